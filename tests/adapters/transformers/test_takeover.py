"""Sessions of the embedded engine that go on after a SIGKILL: real servers, a real holder, a mover done by hand."""

import asyncio
import os
import secrets
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.session.arena import LoadState, SlotState
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume
from support.embedded import Bench, Told, Worker, listen, resume_marker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(90)]

POOL = ("--kv-cache-bytes", str(96 * 1024 * 1024))
TOKENS = 160
BLOCK_TOKENS = 16
# The tiny model's id of byte 0xF0: three special tokens come first.
FIRST_BYTE_OF_EMOJI = 3 + 0xF0

BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Hello there", "temperature": 0, "max_tokens": TOKENS},
    "seeded": {"prompt": "A list of numbers: 1, 2", "temperature": 1.0, "seed": 7, "max_tokens": TOKENS},
    "seedless": {"prompt": "Any seed will do", "temperature": 1.0, "top_p": 0.9, "max_tokens": TOKENS},
    "penalties": {
        "prompt": "the the the",
        "temperature": 0.9,
        "seed": 11,
        "presence_penalty": 2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "top_k": 40,
        "min_p": 0.01,
        "max_tokens": TOKENS,
    },
    "chat": {"messages": [{"role": "user", "content": "Say something 🎉"}], "temperature": 0, "max_tokens": TOKENS},
    "long prompt": {"prompt": "a long story " * 60, "temperature": 0, "max_tokens": TOKENS},
}


def new_session() -> SessionId:
    return SessionId(secrets.token_hex(16))


async def undisturbed(http: aiohttp.ClientSession, worker: Worker, body: dict[str, Any], session: SessionId) -> Told:
    """The answer of a run that nobody interrupts; of the same session, since without a seed its name is the seed."""
    told = await listen(http, worker.url, body, marker=Marker(session, 1))
    assert told.done
    assert told.error is None
    return told


async def all_undisturbed(
    http: aiohttp.ClientSession, worker: Worker, sessions: dict[str, SessionId]
) -> dict[str, Told]:
    told = await asyncio.gather(*(undisturbed(http, worker, BODIES[n], s) for n, s in sessions.items()))
    return dict(zip(sessions, told, strict=True))


async def cut_off(
    http: aiohttp.ClientSession, worker: Worker, sessions: dict[str, SessionId], cuts: dict[str, int]
) -> dict[str, Told]:
    """Run all bodies at once, and kill the worker when each has told as many tokens as its cut says."""
    told = {name: Told() for name in sessions}
    readers = [
        asyncio.create_task(listen(http, worker.url, BODIES[name], marker=Marker(session, 1), told=told[name]))
        for name, session in sessions.items()
    ]
    async with asyncio.timeout(30):
        # What is waited for is a plain list that grows.
        while any(len(told[name].ids) < cut for name, cut in cuts.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    worker.server.kill()
    await asyncio.gather(*readers)
    assert all(t.finish is None for t in told.values()), "the worker was killed too late"
    return told


@pytest.fixture(scope="module")
def standby(bench: Bench) -> Worker:
    """The worker that takes over; it also runs what nobody interrupts."""
    worker = bench.start("standby", args=POOL)
    worker.server.wait_ready()
    return worker


async def test_held_sessions_go_on_elsewhere_at_the_exact_token(
    bench: Bench, standby: Worker, http: aiohttp.ClientSession
) -> None:
    first = bench.start("first", args=POOL)
    sessions = {name: new_session() for name in BODIES}
    wanted = await all_undisturbed(http, standby, sessions)
    first.server.wait_ready()
    told = await cut_off(http, first, sessions, dict.fromkeys(BODIES, 40))

    async def take_over(name: str) -> None:
        session = sessions[name]
        marker = resume_marker(first, session, KvSource.HELD)
        assert marker.resume is not None
        outputs = list(marker.resume.outputs)
        assert outputs[: len(told[name].ids)] == told[name].ids
        resumed, positions = await asyncio.gather(
            listen(http, standby.url, BODIES[name], marker=marker), bench.move(first, standby, session)
        )
        assert resumed.answer == wanted[name].answer, name
        assert resumed.usage == wanted[name].usage
        # Only max_tokens may cut a character in two.
        assert "\ufffd" not in resumed.text[:-1]
        with closing(standby.reader()) as reader:
            slot = reader.find(session)
            assert slot is not None
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, positions, 1)
            assert positions == slot.prompt_len + len(outputs) - 1

    await asyncio.gather(*(take_over(name) for name in BODIES))
    await sweep_cuts(bench, first, standby, http, sessions["greedy"], wanted["greedy"])


async def sweep_cuts(
    bench: Bench, old: Worker, standby: Worker, http: aiohttp.ClientSession, session: SessionId, wanted: Told
) -> None:
    """The same session again and again, from every kind of position that its old blocks still hold."""
    with closing(old.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        journal, prompt_len = reader.journal(slot), slot.prompt_len
    edge = BLOCK_TOKENS - prompt_len % BLOCK_TOKENS
    emoji = [i for i, token in enumerate(journal[:-3]) if token == FIRST_BYTE_OF_EMOJI][:1]
    cuts = {1, 2, edge - 1, edge, edge + 1, edge + BLOCK_TOKENS, len(journal)}
    cuts |= {first + n for first in emoji for n in (1, 2, 3)}
    for generation, cut in enumerate(sorted(cuts), start=3):
        marker = Marker(session, generation, Resume(tuple(journal[:cut]), KvSource.HELD, slot.prompt_hash))
        resumed, positions = await asyncio.gather(
            listen(http, standby.url, BODIES["greedy"], marker=marker), bench.move(old, standby, session)
        )
        assert resumed.answer == wanted.answer, f"cut at {cut}"
        assert positions == prompt_len + cut - 1


async def test_sessions_go_on_in_place_in_the_old_pool(
    bench: Bench, standby: Worker, http: aiohttp.ClientSession
) -> None:
    old = bench.start("phoenix", args=POOL)
    names = ["greedy", "penalties", "chat", "long prompt"]
    sessions = {name: new_session() for name in names}
    wanted = await all_undisturbed(http, standby, sessions)
    old.server.wait_ready()
    await cut_off(http, old, sessions, dict.fromkeys(names, 20))
    with closing(old.reader()) as reader:
        tables = {name: reader.table(reader.find(sessions[name])).blocks for name in names}  # type: ignore[arg-type]
    new = bench.start("phoenix", epoch=2, adopt=old.arena, args=POOL)
    new.server.wait_ready()
    with closing(new.reader()) as reader:
        facts = reader.facts()
        assert facts is not None
        assert facts["adopted"] is True
        assert facts["pools"] == ["phoenix/2/0"]
    # Whoever comes first must not be given the old sessions' blocks.
    stranger = await undisturbed(http, new, BODIES["seeded"], new_session())
    assert stranger.finish == "length"
    given_up = names.pop()
    async with http.delete(f"{new.url}/midstream/reservations/{sessions[given_up]}") as response:
        assert response.status == 204
    async with http.delete(f"{new.url}/midstream/reservations/{sessions[given_up]}") as response:
        assert response.status == 404

    async def go_on(name: str) -> None:
        marker = resume_marker(old, sessions[name], KvSource.IN_PLACE)
        resumed = await listen(http, new.url, BODIES[name], marker=marker)
        assert resumed.answer == wanted[name].answer, name
        with closing(new.reader()) as reader:
            slot = reader.find(sessions[name])
            assert slot is not None
            assert marker.resume is not None
            positions = slot.prompt_len + len(marker.resume.outputs) - 1
            assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, positions, 1)

    await asyncio.gather(*(go_on(name) for name in names))
    # What was given up is computed again, and the report says so.
    marker = resume_marker(old, sessions[given_up], KvSource.IN_PLACE)
    again = await listen(http, new.url, BODIES[given_up], marker=marker)
    assert again.finish == "length"
    assert len(again.ids) == TOKENS
    with closing(new.reader()) as reader:
        slot = reader.find(sessions[given_up])
        assert slot is not None
        assert marker.resume is not None
        assert (slot.load, slot.loaded) == (LoadState.FAILED, 0)
        assert slot.recomputed == slot.prompt_len + len(marker.resume.outputs)
    assert tables["greedy"] != tables["chat"]
    new.server.kill()


async def test_a_restore_that_never_comes_is_computed_again(standby: Worker, http: aiohttp.ClientSession) -> None:
    session = new_session()
    wanted = await undisturbed(http, standby, BODIES["greedy"], session)
    with closing(standby.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        prompt_hash = slot.prompt_hash
    marker = Marker(session, 2, Resume(tuple(wanted.ids[:50]), KvSource.HELD, prompt_hash))
    resumed = await listen(http, standby.url, BODIES["greedy"], marker=marker)
    assert resumed.ids[:50] == wanted.ids[:50]
    assert resumed.finish == "length"
    assert len(resumed.ids) == TOKENS
    with closing(standby.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.FAILED, 0, slot.prompt_len + 50)
        assert reader.counters()["loads_timed_out"] == 1


async def test_a_prompt_that_tokenizes_differently_gets_no_kv(standby: Worker, http: aiohttp.ClientSession) -> None:
    session = new_session()
    marker = Marker(session, 2, Resume((100, 101), KvSource.HELD, "0" * 32))
    resumed = await listen(http, standby.url, {**BODIES["greedy"], "max_tokens": 8}, marker=marker)
    assert resumed.ids[:2] == [100, 101]
    assert len(resumed.ids) == 8
    with closing(standby.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.FAILED, 0, slot.prompt_len + 2)


async def test_journal_only_goes_on_after_the_old_outputs(standby: Worker, http: aiohttp.ClientSession) -> None:
    session = new_session()
    body = {**BODIES["seeded"], "max_tokens": 40}
    wanted = await undisturbed(http, standby, body, session)
    with closing(standby.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        marker = Marker(session, 2, Resume(tuple(wanted.ids[:20]), KvSource.NONE, slot.prompt_hash))
    resumed = await listen(http, standby.url, body, marker=marker)
    assert resumed.ids[:20] == wanted.ids[:20]
    assert resumed.finish == "length"
    assert len(resumed.ids) == 40
    assert resumed.usage == wanted.usage


async def test_a_stop_string_is_found_across_the_cut(
    bench: Bench, standby: Worker, http: aiohttp.ClientSession
) -> None:
    session = new_session()
    plain = await undisturbed(http, standby, BODIES["greedy"], session)
    stop = plain.text[30:36]
    body = {**BODIES["greedy"], "stop": [stop]}
    wanted = await undisturbed(http, standby, body, session)
    assert wanted.finish == "stop"
    assert stop not in wanted.text
    assert wanted.stop_reason == stop
    # Cut within the stop string: its first characters are in the outputs and must not leak.
    cut = len(wanted.ids) - 2
    with closing(standby.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        marker = Marker(session, 2, Resume(tuple(wanted.ids[:cut]), KvSource.NONE, slot.prompt_hash))
    resumed = await listen(http, standby.url, body, marker=marker)
    assert resumed.answer == wanted.answer


async def test_a_finished_session_leaves_no_blocks_behind(standby: Worker, http: aiohttp.ClientSession) -> None:
    session = new_session()
    await undisturbed(http, standby, {**BODIES["greedy"], "max_tokens": 5}, session)
    with closing(standby.reader()) as reader:
        for _ in range(100):
            slot = reader.find(session)
            if slot is not None and slot.state is SlotState.FINISHED:
                break
            await asyncio.sleep(0.01)
        assert slot is not None
        assert slot.finish == "length"
        assert reader.table(slot).blocks == ()
        assert len(reader.journal(slot)) == 5


async def test_the_pool_of_an_engine_that_still_runs_is_not_taken_over(bench: Bench) -> None:
    old = bench.start("stubborn", args=POOL)
    old.server.wait_ready()
    new = bench.start("stubborn", epoch=2, adopt=old.arena, args=POOL)
    new.server.wait_ready()
    with closing(new.reader()) as reader:
        facts = reader.facts()
        assert facts is not None
        assert facts["adopted"] is False
        assert facts["pools"] == ["stubborn/2/0"]
    memories = set()
    for epoch in (1, 2):
        fd, _ = HolderClient(bench.socket).get(f"stubborn/{epoch}/0")
        memories.add(os.fstat(fd).st_ino)
        os.close(fd)
    assert len(memories) == 2
    new.server.kill()
    old.server.kill()


async def test_an_engine_waits_for_the_end_of_the_one_before_it(bench: Bench) -> None:
    old = bench.start("late", args=POOL)
    old.server.wait_ready()
    # A process that is stopped has not ended, and does not end by itself.
    old.server.process.send_signal(signal.SIGSTOP)
    new = bench.start("late", epoch=2, adopt=old.arena, args=POOL)
    while not _maps(new.server.process.pid, "libtorch"):
        assert new.server.process.poll() is None
        await asyncio.sleep(0.05)
    old.server.kill()
    new.server.wait_ready()
    with closing(new.reader()) as reader:
        facts = reader.facts()
        assert facts is not None
        assert facts["adopted"] is True
    new.server.kill()


def _maps(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()
