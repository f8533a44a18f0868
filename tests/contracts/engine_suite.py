"""What every engine must do (adapters/contract.py). An engine's test module inherits EngineContract.

It gives the fixture `engine` (module scope) and takes the others from here by name:

    from contracts.engine_suite import EngineContract, beside, fallen, first, mover, standby

Everything runs on real engines beside a real holder and a real mover, without a sidecar: four starts in all.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.adapters.contract import HttpCall
from midstream.loadtest.client import Answer, read_stream
from midstream.session.arena import LoadState, SlotState
from midstream.session.errors import EngineError
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import MoverError, RestoreResult
from support.beside import BesideEngines, EngineUnderTest, Running

TOKENS = 100
CUT = 30
LOAD_S = 5.0
# What is killed; the first of them is all that an engine gets whose answers depend on the batch.
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "Long ago and far away", "temperature": 0.8, "seed": 5, "presence_penalty": 0.5},
    {"messages": [{"role": "user", "content": "Tell me of the sea 🎉"}], "temperature": 0},
    {"prompt": "One, two, three, " * 20, "temperature": 0},
)
GREEDY: dict[str, Any] = {"prompt": "The weather tomorrow is", "temperature": 0, "max_tokens": TOKENS}


def new_session() -> SessionId:
    return SessionId(secrets.token_hex(16))


@dataclass(frozen=True, slots=True)
class Fallen:
    """A session whose engine was killed: what its client had got, and what the arena knows."""

    body: dict[str, Any]
    session: SessionId
    delivered: tuple[int, ...]
    outputs: tuple[int, ...]
    prompt_len: int
    prompt_hash: str

    def resume(self, generation: int, kv: KvSource) -> Marker:
        """Where it goes on."""
        return Marker(self.session, generation, Resume(self.outputs, kv, self.prompt_hash))


@dataclass(frozen=True, slots=True)
class FallenEngine:
    """A killed engine and its sessions."""

    running: Running
    sessions: tuple[Fallen, ...]


async def ask(
    engine: EngineUnderTest,
    running: Running,
    body: dict[str, Any],
    marker: Marker,
    on_tokens: Callable[[Answer], Any] | None = None,
) -> Answer:
    """Send a session to an engine as the proxy does, and read its stream."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    said = {"model": engine.model, "max_tokens": TOKENS, **body}
    write = engine.adapter.submit if marker.resume is None else engine.adapter.resume
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
        return await read_stream(http, running.url + path, write(said, marker), on_tokens=on_tokens)


async def whole(
    engine: EngineUnderTest,
    running: Running,
    body: dict[str, Any],
    marker: Marker | None = None,
    on_tokens: Callable[[Answer], Any] | None = None,
) -> Answer:
    """An answer that must end well."""
    answer = await ask(engine, running, body, marker or Marker(new_session(), 1), on_tokens)
    assert answer.whole, (answer.error, answer.violations)
    return answer


async def call(running: Running, http_call: HttpCall) -> int:
    """The status of an operator's call."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http,
        http.request(http_call.method, running.url + http_call.path) as answer,
    ):
        await answer.read()
        return answer.status


@pytest.fixture(scope="module")
def beside(engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideEngines]:
    """A holder and a mover, and the engines beside them."""
    beside = BesideEngines(tmp_path_factory.mktemp("beside"), engine)
    yield beside
    beside.close()


@pytest.fixture(scope="module")
def first(beside: BesideEngines) -> Running:
    """The engine that will be killed; not to be used but through `fallen`."""
    return beside.start("first")


@pytest.fixture(scope="module")
def standby(beside: BesideEngines, first: Running) -> Running:
    """The engine that serves all tests and takes sessions over; both load at the same time."""
    running = beside.start("standby")
    beside.ready(first, running)
    return running


@pytest.fixture(scope="module")
def fallen(engine: EngineUnderTest, first: Running, standby: Running) -> FallenEngine:
    """Sessions that had got some tokens when their engine was killed."""
    sessions = [(body, new_session()) for body in BODIES[: engine.streams]]
    answers = asyncio.run(_kill_under(engine, first, sessions))
    told = []
    for (body, session), answer in zip(sessions, answers, strict=True):
        slot, journal, _ = first.slot(session)
        assert slot is not None
        assert slot.state is SlotState.LIVE
        assert tuple(journal[: len(answer.token_ids)]) == tuple(answer.token_ids), "journaled before it was sent"
        assert CUT <= len(journal) < TOKENS
        told.append(Fallen(body, session, tuple(answer.token_ids), tuple(journal), slot.prompt_len, slot.prompt_hash))
    return FallenEngine(first, tuple(told))


async def _kill_under(
    engine: EngineUnderTest, running: Running, sessions: list[tuple[dict[str, Any], SessionId]]
) -> list[Answer]:
    counts: dict[SessionId, int] = {}

    def note(session: SessionId) -> Callable[[Answer], None]:
        def on_tokens(answer: Answer) -> None:
            counts[session] = len(answer.token_ids)
            if len(counts) == len(sessions) and min(counts.values()) >= CUT and running.process.poll() is None:
                running.kill()

        return on_tokens

    return await asyncio.gather(*(ask(engine, running, b, Marker(s, 1), note(s)) for b, s in sessions))


@pytest_asyncio.fixture
async def mover(beside: BesideEngines) -> AsyncIterator[MoverClient]:
    """A connection to the mover."""
    client = MoverClient(beside.mover_socket)
    yield client
    await client.close()


class EngineContract:
    """Inherit, and define the module-scoped fixture `engine` that returns an EngineUnderTest."""

    def test_its_adapter_knows_its_command_and_no_other(self, engine: EngineUnderTest) -> None:
        assert engine.adapter.recognises(engine.argv)
        assert not engine.adapter.recognises(["python", "-m", "http.server"])
        with pytest.raises(EngineError, match="where it goes on"):
            engine.adapter.resume({}, Marker(new_session(), 2))

    async def test_its_facts_name_pools_that_are_held_and_its_key_is_the_same_at_each_start(
        self, engine: EngineUnderTest, beside: BesideEngines, first: Running, standby: Running
    ) -> None:
        one, other = first.facts(), standby.facts()
        assert one["engine"] == other["engine"] == engine.adapter.name
        held = {pool.name for pool in beside.holder.list()}
        assert one["pools"]
        assert other["pools"]
        assert not set(one["pools"]) & set(other["pools"])
        assert held >= {*one["pools"], *other["pools"]}
        key = engine.adapter.key(one)
        assert key.difference(engine.adapter.key(other)) == ()
        foreign = engine.adapter.key({"key": {**key.to_json(), "engine": "another", "dtype": "int3"}})
        assert key.difference(foreign) == ("dtype", "engine")
        with pytest.raises(EngineError, match="model missing"):
            engine.adapter.key({"key": {**key.to_json(), "model": ""}})

    async def test_what_is_streamed_was_journaled_and_the_table_covers_it(
        self, engine: EngineUnderTest, standby: Running
    ) -> None:
        marker = Marker(new_session(), 1)
        seen: list[tuple[int, int, int]] = []

        def look(answer: Answer) -> None:
            slot, journal, blocks = standby.slot(marker.session)
            if slot is not None and slot.state is SlotState.LIVE:
                assert journal[: len(answer.token_ids)] == answer.token_ids
                seen.append((slot.prompt_len, len(journal), len(blocks)))

        answer = await whole(engine, standby, GREEDY, marker, look)
        assert seen
        for prompt_len, journal_len, block_count in seen:
            assert block_count * engine.block_tokens >= prompt_len + journal_len - 1
        assert answer.usage is not None
        assert {prompt_len for prompt_len, _, _ in seen} == {answer.usage["prompt_tokens"]}
        slot, journal = await finished(standby, marker.session)
        assert slot.finish == answer.finish == "length"
        assert journal == answer.token_ids

    async def test_without_kv_it_goes_on_after_the_old_outputs(self, engine: EngineUnderTest, standby: Running) -> None:
        marker, wanted = await begun(engine, standby)
        slot, _ = await finished(standby, marker.session)
        resume = Resume(tuple(wanted.token_ids[:CUT]), KvSource.NONE, slot.prompt_hash)
        answer = await whole(engine, standby, GREEDY, Marker(marker.session, 2, resume))
        assert answer.token_ids[:CUT] == wanted.token_ids[:CUT]
        assert len(answer.token_ids) == TOKENS
        assert (answer.finish, answer.usage) == (wanted.finish, wanted.usage)
        again, journal = await finished(standby, marker.session, 2)
        assert (again.loaded, again.resumed) == (0, CUT)
        assert journal == answer.token_ids

    async def test_a_finished_answer_is_told_to_its_end_and_nothing_is_computed(
        self, engine: EngineUnderTest, standby: Running
    ) -> None:
        marker, wanted = await begun(engine, standby)
        slot, _ = await finished(standby, marker.session)
        resume = Resume(tuple(wanted.token_ids), KvSource.NONE, slot.prompt_hash, finish="length")
        answer = await whole(engine, standby, GREEDY, Marker(marker.session, 2, resume))
        assert answer.same_as(wanted)
        again, journal, _ = standby.slot(marker.session, 2)
        assert again is None or (again.recomputed == 0 and journal == wanted.token_ids)

    async def test_a_prompt_that_is_another_gets_no_kv(
        self, engine: EngineUnderTest, standby: Running, fallen: FallenEngine, mover: MoverClient
    ) -> None:
        lost = fallen.sessions[0]
        marker = Marker(lost.session, 9, Resume(lost.outputs, KvSource.HELD, "0" * 32))
        restored, answer = await asyncio.gather(
            restore(mover, fallen, lost, standby, 9, deadline_s=2.0), whole(engine, standby, lost.body, marker)
        )
        assert not restored.ok
        assert tuple(answer.token_ids[: len(lost.outputs)]) == lost.outputs
        assert len(answer.token_ids) == TOKENS
        slot, _ = await finished(standby, lost.session, 9)
        assert slot.loaded == 0
        assert slot.load is not LoadState.DONE

    async def test_quiet_stops_tokens_and_ends_nothing(self, engine: EngineUnderTest, standby: Running) -> None:
        quiesce, unquiesce = engine.adapter.quiesce(), engine.adapter.unquiesce()
        if not engine.adapter.capabilities.quiesce:
            assert quiesce is None
            assert unquiesce is None
            return
        assert quiesce is not None
        assert unquiesce is not None
        wanted = await whole(engine, standby, GREEDY)
        marker = Marker(new_session(), 1)
        begun = asyncio.Event()
        stream = asyncio.create_task(
            whole(engine, standby, GREEDY, marker, lambda a: begun.set() if len(a.token_ids) > 5 else None)
        )
        await begun.wait()
        try:
            assert await call(standby, quiesce) in (200, 204)
            await asyncio.sleep(0.3)
            before = len(standby.slot(marker.session)[1])
            assert await call(standby, engine.adapter.health()) == 200
            await asyncio.sleep(0.7)
            assert len(standby.slot(marker.session)[1]) == before < TOKENS
        finally:
            assert await call(standby, unquiesce) in (200, 204)
        assert (await stream).same_as(wanted)

    async def test_a_client_that_leaves_frees_its_session(self, engine: EngineUnderTest, standby: Running) -> None:
        marker = Marker(new_session(), 1)
        begun = asyncio.Event()
        stream = asyncio.create_task(
            ask(engine, standby, {**GREEDY, "max_tokens": 1500}, marker, lambda answer: begun.set())
        )
        await begun.wait()
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        slot, journal = await finished(standby, marker.session, limit_s=1.5)
        assert slot.finish not in ("stop", "length")
        assert 0 < len(journal) < 1500

    async def test_held_kv_is_taken_up_by_another_at_the_exact_token(
        self, engine: EngineUnderTest, standby: Running, fallen: FallenEngine, mover: MoverClient
    ) -> None:
        for lost in fallen.sessions:
            restored, answer = await asyncio.gather(
                restore(mover, fallen, lost, standby, 2),
                whole(engine, standby, lost.body, lost.resume(2, KvSource.HELD)),
            )
            assert restored.ok, restored
            slot, journal = await finished(standby, lost.session, 2)
            positions = lost.prompt_len + len(lost.outputs) - 1
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, positions, 1)
            assert restored.tokens == positions
            assert journal == answer.token_ids
            assert answer.same_as(await whole(engine, standby, lost.body))

    async def test_the_restarted_engine_goes_on_in_place(
        self, engine: EngineUnderTest, beside: BesideEngines, standby: Running, fallen: FallenEngine, mover: MoverClient
    ) -> None:
        before = {lost.session: fallen.running.slot(lost.session)[2] for lost in fallen.sessions}
        # Blocks that several sessions had (a cached prefix) can be only one's again; the others get copies.
        tables = [block for table in before.values() for block in table]
        shared = {block for block in tables if tables.count(block) > 1}
        again = beside.start("first", epoch=2, adopt=fallen.running.arena)
        beside.ready(again)
        facts = again.facts()
        assert facts["adopted"] is True
        assert facts["pools"] != fallen.running.facts()["pools"]
        assert engine.adapter.key(facts).difference(engine.adapter.key(standby.facts())) == ()
        # A stranger who comes first gets none of the old sessions' blocks.
        await whole(engine, again, {"prompt": "I was never here " * 10, "temperature": 0})
        for lost in fallen.sessions:
            blocks: list[list[int]] = []

            def look(_: Answer, session: SessionId = lost.session, blocks: list[list[int]] = blocks) -> None:
                blocks.append(again.slot(session)[2])

            _, answer = await asyncio.gather(
                restore(mover, fallen, lost, again, 3, deadline_s=1.0),
                whole(engine, again, lost.body, lost.resume(3, KvSource.IN_PLACE), look),
            )
            slot, _ = await finished(again, lost.session, 3)
            positions = lost.prompt_len + len(lost.outputs) - 1
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, positions, 1)
            full = positions // engine.block_tokens
            own = [b for b in before[lost.session][:full] if b not in shared]
            # The first look may be at a replay that is ahead of the core, which has taken no block yet.
            taken = max(blocks, key=len)
            assert [b for b in taken[:full] if b in own] == own, "the very same blocks"
            assert answer.same_as(await whole(engine, standby, lost.body))
        again.kill()

    async def test_without_an_arena_it_serves(
        self, engine: EngineUnderTest, beside: BesideEngines, standby: Running
    ) -> None:
        bare = beside.start("bare", with_arena=False)
        beside.ready(bare)
        answer = await whole(engine, bare, GREEDY)
        assert answer.same_as(await whole(engine, standby, GREEDY))
        bare.kill()


async def begun(engine: EngineUnderTest, running: Running) -> tuple[Marker, Answer]:
    """A session that ran to its end."""
    marker = Marker(new_session(), 1)
    return marker, await whole(engine, running, GREEDY, marker)


async def finished(
    running: Running, session: SessionId, generation: int | None = None, limit_s: float = 5.0
) -> tuple[Any, list[int]]:
    """The record and the journal of a session whose slot is free again."""
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while True:
        slot, journal, _ = running.slot(session, generation)
        if slot is not None and slot.state is SlotState.FINISHED:
            return slot, journal
        assert asyncio.get_running_loop().time() < deadline_s, f"session {session} is not over: {slot}"
        await asyncio.sleep(0.02)


async def restore(
    mover: MoverClient, fallen: FallenEngine, lost: Fallen, to: Running, generation: int, *, deadline_s: float = LOAD_S
) -> RestoreResult:
    """Have the mover bring the KV of a fallen session; a refusal is a result too."""
    assert fallen.running.arena is not None
    assert to.arena is not None
    try:
        return await mover.restore(
            lost.session,
            source=(fallen.running.arena, 1),
            to_arena=to.arena,
            to_generation=generation,
            deadline_s=deadline_s,
        )
    except MoverError as error:
        return RestoreResult(False, reason=error.reason.value, error=str(error))
