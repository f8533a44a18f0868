"""The decode loop with a model of three lines: order, bounds, back-pressure, and where KV comes from."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from midstream.adapters.prompt import prompt_hash
from midstream.adapters.transformers.adopt import Reservation, Reservations
from midstream.adapters.transformers.engine import CHUNK_TOKENS, Engine, chunk_end
from midstream.adapters.transformers.extents import Extents, Run
from midstream.adapters.transformers.fields import RequestError
from midstream.adapters.transformers.job import Job, Limits, Session
from midstream.adapters.transformers.outbox import CAPACITY
from midstream.adapters.transformers.output import Finish, Output, Piece, TokenLogprobs
from midstream.adapters.transformers.protocol import SamplingParams
from midstream.adapters.transformers.recording import Recorder
from midstream.session.arena import ArenaReader, LoadState, SlotState, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume

PROMPT = (1, 2, 3, 4, 5)
SESSION = SessionId("ab" * 16)
BLOCK = 4


class Adding:
    """A model whose cache holds the tokens themselves; the next token is the sum of all, modulo 251."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.forwards: list[tuple[int, int]] = []
        self.before: Callable[[Sequence[int]], None] = lambda ids: None

    def cache(self, run: Run) -> Run:
        return run

    def forward(self, ids: Sequence[int], start: int, cache: Run) -> int:
        self.before(ids)
        first = cache.start * BLOCK
        assert first + start + len(ids) <= cache.end * BLOCK
        for offset, token in enumerate(ids):
            self.memory[first + start + offset] = token
        self.forwards.append((start, len(ids)))
        return sum(self.memory.get(first + i, 0) for i in range(start + len(ids))) % 251


class Taking:
    """A sampler that takes what the model says."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def observe(self, token: int) -> None:
        self.seen.append(token)

    def sample(self, raw: Any, index: int) -> tuple[int, TokenLogprobs | None]:
        assert index == len(self.seen)
        return int(raw), None


def outputs_of(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids) % 251)
    return ids[len(prompt) :]


def job(max_tokens: int = 10, marker: Marker | None = None, prompt: tuple[int, ...] = PROMPT) -> Job:
    return Job("job", prompt, SamplingParams(), max_tokens, marker)


@asynccontextmanager
async def engine(
    model: Adding,
    *,
    arena: Path | None = None,
    limits: Limits | None = None,
    blocks: int = 32,
    reservations: Reservations | None = None,
    extents: Extents | None = None,
) -> AsyncIterator[Engine]:
    recorder = Recorder(None if arena is None else ArenaWriter.open(arena))
    running = Engine(
        model,
        extents or Extents(blocks),
        limits or Limits(BLOCK, 4, 4, 0.3),
        make_sampler=lambda _: Taking(),
        make_output=lambda j: Output(j.params, j.max_tokens, frozenset(), lambda ids: "x" * len(ids), j.prompt_ids),
        recorder=recorder,
        reservations=reservations or Reservations(),
    )
    running.start()
    try:
        yield running
    finally:
        await asyncio.to_thread(running.stop)
        recorder.close()


async def whole(session: Session) -> list[Piece]:
    pieces: list[Piece] = []
    async with asyncio.timeout(10):
        while not pieces or pieces[-1].finish is None:
            pieces += await session.outbox.take()
    return pieces


async def until(true: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s, "it never became true"
        await asyncio.sleep(0.002)


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    create_arena(path, slot_count=8, page_count=64)
    return path


def resumed(outputs: Sequence[int], kv: KvSource, *, prompt: Sequence[int] = PROMPT) -> Marker:
    return Marker(SESSION, 2, Resume(tuple(outputs), kv, prompt_hash(prompt)))


async def test_sessions_do_not_change_each_other() -> None:
    async with engine(Adding()) as running:
        sessions = [running.submit(job(20, prompt=(n, n + 1))) for n in range(4)]
        answers = await asyncio.gather(*map(whole, sessions))
    assert [ids_of(a) for a in answers] == [outputs_of((n, n + 1), 20) for n in range(4)]
    assert all(a[-1].finish is Finish.LENGTH for a in answers)


async def test_a_token_is_journaled_and_its_blocks_are_written_before_it_is_handed_over(arena: Path) -> None:
    model = Adding()
    with closing(ArenaReader(arena)) as reader:
        tables: list[tuple[int, ...]] = []

        def look(_: Sequence[int]) -> None:
            slot = reader.find(SESSION)
            assert slot is not None
            tables.append(reader.table(slot).blocks)

        model.before = look
        async with engine(model, arena=arena) as running:
            session = running.submit(job(6, Marker(SESSION, 1)))
            got: list[int] = []
            while len(got) < 6:
                for piece in await session.outbox.take():
                    got += piece.token_ids
                    slot = reader.find(SESSION)
                    assert slot is not None
                    assert reader.journal(slot)[: len(got)] == got
            assert set(tables) == {(0, 1, 2)}


async def test_a_long_prompt_is_computed_in_fixed_chunks() -> None:
    model = Adding()
    prompt = tuple(n % 7 for n in range(2 * CHUNK_TOKENS + 10))
    async with engine(model, blocks=300) as running:
        pieces = await whole(running.submit(job(2, prompt=prompt)))
    assert ids_of(pieces) == outputs_of(prompt, 2)
    assert model.forwards == [
        (0, CHUNK_TOKENS),
        (CHUNK_TOKENS, CHUNK_TOKENS),
        (2 * CHUNK_TOKENS, 10),
        (len(prompt), 1),
    ]
    assert chunk_end(CHUNK_TOKENS + 3, 5000) == 2 * CHUNK_TOKENS


async def test_a_slow_client_stops_its_own_session_and_no_other() -> None:
    model = Adding()
    async with engine(model, blocks=400) as running:
        slow, quick = running.submit(job(500)), running.submit(job(500))
        assert ids_of(await whole(quick)) == outputs_of(PROMPT, 500)
        await asyncio.sleep(0.05)
        assert slow.output.count == CAPACITY
        assert ids_of(await whole(slow)) == outputs_of(PROMPT, 500)


async def test_requests_wait_for_blocks_and_too_many_are_sent_away() -> None:
    async with engine(Adding(), limits=Limits(BLOCK, 4, 2, 1.0), blocks=4) as running:
        first = running.submit(job(11))
        await until(lambda: first.output.count > 0)
        waiting = [running.submit(job(5)), running.submit(job(5))]
        with pytest.raises(RequestError) as caught:
            running.submit(job(5))
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        assert all(s.output.count == 0 for s in waiting)
        await whole(first)
        running.close(first)
        for session in waiting:
            assert ids_of(await whole(session)) == outputs_of(PROMPT, 5)
            running.close(session)
        assert running.open_count == 0


async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    async with engine(Adding(), blocks=4) as running:
        with pytest.raises(RequestError, match=r"5 prompt tokens and max_tokens 12 need 5 blocks .* the pool has 4"):
            running.submit(job(12))


async def test_closing_a_session_frees_its_blocks(arena: Path) -> None:
    extents = Extents(4)
    async with engine(Adding(), arena=arena, extents=extents) as running:
        session = running.submit(job(11, Marker(SESSION, 1)))
        await session.outbox.take()
        running.close(session)
        running.close(session)
        await until(lambda: extents.free_count == 4, 1.0)
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            assert reader.table(slot).blocks == ()


async def test_one_session_s_failure_is_its_own() -> None:
    model = Adding()

    def fail(ids: Sequence[int]) -> None:
        if 99 in ids:
            raise RuntimeError("no such number")

    model.before = fail
    async with engine(model) as running:
        bad, good = running.submit(job(prompt=(99,))), running.submit(job())
        (last,) = await whole(bad)
        assert last.finish is Finish.ERROR
        assert last.error is not None
        assert "no such number" in last.error
        assert ids_of(await whole(good)) == outputs_of(PROMPT, 10)
        assert running.healthy


async def test_a_model_that_computes_no_more_is_unhealthy() -> None:
    model = Adding()

    def fail(_: Sequence[int]) -> None:
        raise RuntimeError("device lost")

    model.before = fail
    async with engine(model) as running:
        for _ in range(3):
            assert running.healthy
            assert (await whole(running.submit(job())))[-1].finish is Finish.ERROR
        assert not running.healthy


async def test_a_decode_loop_that_fails_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(Adding(), blocks=400) as running:
        session = running.submit(job(1000))
        await until(lambda: session.output.count > 0)
        monkeypatch.setattr(running, "turn", lambda: 1 / 0)
        assert (await whole(session))[-1].error is not None
        assert not running.healthy
        with pytest.raises(RequestError, match="decode loop has failed"):
            running.submit(job())


async def test_kv_that_the_mover_brought_is_not_computed_again(arena: Path) -> None:
    model, done = Adding(), outputs_of(PROMPT, 4)
    async with engine(model, arena=arena) as running:
        session = running.submit(job(10, resumed(done, KvSource.HELD)))
        (replay,) = await session.outbox.take()
        assert list(replay.token_ids) == done
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            await until(lambda: reader.find(SESSION).load is LoadState.WAITING)  # type: ignore[union-attr]
            first = reader.table(slot).blocks[0] * BLOCK
            model.memory |= {first + i: token for i, token in enumerate([*PROMPT, *done][:-1])}
            reader.answer(slot, LoadState.DONE, len(PROMPT) + 3)
            assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)[4:]
            assert model.forwards[0] == (len(PROMPT) + 3, 1)
            slot = reader.find(SESSION)
            assert slot is not None
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, len(PROMPT) + 3, 1)


@pytest.mark.parametrize("answer", [LoadState.FAILED, None])
async def test_without_kv_everything_is_computed_again(arena: Path, answer: LoadState | None) -> None:
    model, done = Adding(), outputs_of(PROMPT, 4)
    extents = Extents(8)
    async with engine(model, arena=arena, extents=extents) as running:
        session = running.submit(job(10, resumed(done, KvSource.DISK)))
        with closing(ArenaReader(arena)) as reader:
            await session.outbox.take()
            slot = reader.find(SESSION)
            assert slot is not None
            before = reader.table(slot).blocks
            if answer is not None:
                reader.answer(slot, answer, 0)
            assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)[4:]
            slot = reader.find(SESSION)
            assert slot is not None
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.FAILED, 0, len(PROMPT) + 4)
            after = reader.table(slot).blocks
        # A mover that never answered may still write to the old blocks, so nobody computes there.
        assert (set(before) & set(after) == set()) == (answer is None)
        running.close(session)
        await until(lambda: extents.free_count == (8 if answer else 4))


async def test_blocks_of_a_restore_that_was_given_up_rest_until_the_mover_answers(arena: Path) -> None:
    extents = Extents(8)
    async with engine(Adding(), arena=arena, extents=extents) as running:
        session = running.submit(job(10, resumed(outputs_of(PROMPT, 4), KvSource.HELD)))
        await session.outbox.take()
        running.close(session)
        with closing(ArenaReader(arena)) as reader:
            await until(lambda: reader.find(SESSION).state is SlotState.FINISHED)  # type: ignore[union-attr]
            assert extents.free_count == 4
            slot = reader.find(SESSION)
            assert slot is not None
            reader.answer(slot, LoadState.FAILED, 0)
            await until(lambda: extents.free_count == 8)


def reservation(model: Adding, extents: Extents, outputs: Sequence[int]) -> Reservations:
    run = Run(3, 4)
    assert extents.reserve(run)
    model.memory |= {run.start * BLOCK + i: token for i, token in enumerate([*PROMPT, *outputs][:-1])}
    covered = len(PROMPT) + len(outputs) - 1
    found = Reservation(SESSION, run, len(PROMPT), prompt_hash(PROMPT), tuple(outputs), covered)
    return Reservations((found,), now_s=time.monotonic())


async def test_in_place_the_old_blocks_are_used_as_they_are(arena: Path) -> None:
    model, extents, done = Adding(), Extents(16), outputs_of(PROMPT, 4)
    kept = reservation(model, extents, done)
    async with engine(model, arena=arena, extents=extents, reservations=kept) as running:
        stranger = running.submit(job(10, prompt=(9, 9)))
        assert ids_of(await whole(stranger)) == outputs_of((9, 9), 10)
        # A shorter cut than the old journal: what lies behind it is computed anew.
        session = running.submit(job(10, resumed(done[:3], KvSource.IN_PLACE)))
        assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)
        assert (len(PROMPT) + 2, 1) in model.forwards
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            assert reader.table(slot).blocks == (3, 4, 5, 6)
            assert (slot.loaded, slot.recomputed) == (len(PROMPT) + 2, 1)


async def test_blocks_that_the_mover_copies_from_are_nobody_s_until_it_has_answered(arena: Path) -> None:
    model, extents, done = Adding(), Extents(12), outputs_of(PROMPT, 4)
    kept = reservation(model, extents, done)
    old = dict(model.memory)
    async with engine(model, arena=arena, extents=extents, reservations=kept) as running:
        session = running.submit(job(10, resumed(done, KvSource.HELD)))
        stranger = running.submit(job(10, prompt=(9, 9)))
        assert ids_of(await whole(stranger)) == outputs_of((9, 9), 10)
        assert {place: model.memory[place] for place in old} == old
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            first = reader.table(slot).blocks[0] * BLOCK
            assert first // BLOCK not in range(3, 7)
            model.memory |= {first + place - 3 * BLOCK: token for place, token in old.items()}
            reader.answer(slot, LoadState.DONE, len(PROMPT) + 3)
        assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)
        for ended in (session, stranger):
            running.close(ended)
        await until(lambda: extents.free_count == 12)


async def test_without_room_beside_the_blocks_to_copy_from_everything_is_computed_again(arena: Path) -> None:
    model, extents, done = Adding(), Extents(7), outputs_of(PROMPT, 4)
    kept = reservation(model, extents, done)
    async with engine(model, arena=arena, extents=extents, reservations=kept) as running:
        session = running.submit(job(10, resumed(done, KvSource.HELD)))
        assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.FAILED, 0, len(PROMPT) + 4)


@pytest.mark.parametrize("wrong", ["outputs", "prompt"])
async def test_in_place_another_s_tokens_get_no_kv(arena: Path, wrong: str) -> None:
    model, extents, done = Adding(), Extents(16), outputs_of(PROMPT, 4)
    kept = reservation(model, extents, done)
    prompt = PROMPT if wrong == "outputs" else (7, *PROMPT[1:])
    outputs = [0, 0] if wrong == "outputs" else outputs_of(prompt, 2)
    async with engine(model, arena=arena, extents=extents, reservations=kept) as running:
        marker = resumed(outputs, KvSource.IN_PLACE, prompt=prompt)
        session = running.submit(job(6, marker, prompt=prompt))
        assert ids_of(await whole(session)) == [*outputs, *outputs_of([*prompt, *outputs], 4)]
        assert model.forwards[0] == (0, len(prompt) + 2)
        running.close(session)
        await until(lambda: extents.free_count == 16)


async def test_a_reservation_that_is_given_up_frees_its_blocks() -> None:
    model, extents = Adding(), Extents(16)
    kept = reservation(model, extents, outputs_of(PROMPT, 4))
    async with engine(model, extents=extents, reservations=kept):
        await asyncio.sleep(0.02)
        assert extents.free_count == 12
        assert kept.give_up(SESSION)
        assert not kept.give_up(SESSION)
        await until(lambda: extents.free_count == 16)


def test_reservations_do_not_wait_for_ever() -> None:
    kept = reservation(Adding(), Extents(16), [1])
    assert kept.returned(time.monotonic() + 119) == []
    assert kept.returned(time.monotonic() + 121) == [Run(3, 4)]
    assert kept.take(SESSION) is None


async def test_a_full_arena_costs_the_snapshot_and_not_the_session(tmp_path: Path) -> None:
    path = tmp_path / "small"
    create_arena(path, slot_count=1, page_count=2)
    async with engine(Adding(), arena=path, blocks=400) as running:
        first = running.submit(job(40, Marker(SESSION, 1)))
        await until(lambda: first.output.count > 0)
        second = running.submit(job(40, Marker(SessionId("cd" * 16), 1)))
        assert ids_of(await whole(second)) == outputs_of(PROMPT, 40)
        assert ids_of(await whole(first)) == outputs_of(PROMPT, 40)
        with closing(ArenaReader(path)) as reader:
            assert reader.counters()["arena_full"] >= 1


async def test_a_recorder_that_raises_costs_the_snapshot_and_not_the_session(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> bool:
        raise OSError("the tmpfs is gone")

    monkeypatch.setattr("midstream.session.arena_writer.SlotWriter.append_tokens", broken)
    async with engine(Adding(), arena=arena) as running:
        session = running.submit(job(10, Marker(SESSION, 1)))
        assert ids_of(await whole(session)) == outputs_of(PROMPT, 10)
    assert "the tmpfs is gone" in caplog.text
    with closing(ArenaReader(arena)) as reader:
        assert reader.counters()["hook_errors"] == 1


async def test_an_aborted_engine_leaves_every_record_for_others(arena: Path) -> None:
    extents = Extents(400)
    async with engine(Adding(), arena=arena, extents=extents) as running:
        session = running.submit(job(1000, Marker(SESSION, 1)))
        queued = [running.submit(job(600)) for _ in range(2)]
        await until(lambda: session.output.count > 10)
        running.abort_all()
        pieces = await whole(session)
        assert pieces[-1].finish is Finish.ABORT
        assert (await whole(queued[1]))[-1].finish is Finish.ABORT
        running.close(session)
        with closing(ArenaReader(arena)) as reader:
            slot = reader.find(SESSION)
            assert slot is not None
            assert slot.state is SlotState.LIVE
            assert reader.journal(slot)[: len(ids_of(pieces))] == ids_of(pieces)
            assert len(reader.table(slot).blocks) == 252


async def test_a_quiet_engine_takes_no_step_and_moves_no_block(arena: Path) -> None:
    model, extents = Adding(), Extents(400)
    async with engine(model, arena=arena, extents=extents) as running:
        session = running.submit(job(1000, Marker(SESSION, 1)))
        drained = asyncio.create_task(whole(session))
        await until(lambda: session.output.count > 10)
        assert await asyncio.to_thread(running.quiesce)
        count = len(model.forwards)
        running.close(session)
        await asyncio.sleep(0.1)
        assert len(model.forwards) == count
        assert extents.free_count == 400 - 252
        running.unquiesce()
        await until(lambda: extents.free_count == 400)
        drained.cancel()


async def test_the_decode_thread_is_one_of_its_own() -> None:
    names: set[str] = set()
    model = Adding()
    model.before = lambda _: names.add(threading.current_thread().name)
    async with engine(model) as running:
        await whole(running.submit(job()))
    assert names == {"decode"}
