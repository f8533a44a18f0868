"""Deaths at bad moments, of real vLLM workers: in a prefill, in a restore, and of both workers one after the other."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import aiohttp
import psutil
import pytest

from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.ticket import worker_dir
from support.vllm_rig import ASK_REPORT, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(600)]

# Some 800 tokens: more than ten steps of prefill.
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 80
STORY = "Write a long story about a dog named Max."
WAIT_S = 90.0


@pytest.fixture(scope="module")
def rig(vllm_pair: Rig) -> Rig:
    """A sidecar with two workers."""
    return vllm_pair


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Look until something is there; shared memory and processes make no noise."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline_s, f"{what} within {WAIT_S:g} s"
        await asyncio.sleep(0.01)


async def session_of(rig: Rig, http: aiohttp.ClientSession, known: set[str]) -> dict[str, Any] | None:
    """The session that was not there before."""
    return next((s for s in await rig.sidecar.sessions(http) if s["session"] not in known), None)


@asynccontextmanager
async def asked(
    rig: Rig, http: aiohttp.ClientSession, case: Case, on_tokens: Callable[[Answer], Any] | None = None
) -> "AsyncIterator[tuple[asyncio.Task[Answer], str]]":
    """A running request and its session."""
    await rig.ready(http)
    known = {s["session"] for s in await rig.sidecar.sessions(http)}
    answer = asyncio.create_task(rig.ask(http, case, headers=ASK_REPORT, on_tokens=on_tokens))
    try:
        session = await until(lambda: session_of(rig, http, known), "it did not become a session")
        yield answer, session["session"]
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def told(rig: Rig, http: aiohttp.ClientSession, session: str) -> dict[str, Any]:
    """What the sidecar says of a session."""
    return next(s for s in await rig.sidecar.sessions(http) if s["session"] == session)


async def worker_of(rig: Rig, http: aiohttp.ClientSession, session: str) -> dict[str, Any]:
    """The worker that a session is on."""
    name = (await told(rig, http, session))["worker"]
    return next(w for w in await rig.sidecar.workers(http) if w["name"] == name)


def prefilling(rig: Rig, worker: dict[str, Any]) -> bool:
    """Whether a worker has a session with blocks and without a token."""
    path = worker_dir(rig.sidecar.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
    with closing(ArenaReader(path)) as reader:
        live = [s for s in reader.slots() if s.state is SlotState.LIVE]
        return bool(live) and all(reader.table(s).blocks and not reader.journal(s) for s in live)


async def test_a_death_during_the_prefill_costs_nothing_but_time(rig: Rig, http: aiohttp.ClientSession) -> None:
    case = Case(completion(LONG_PROMPT, max_tokens=24, temperature=0.8, seed=3), COMPLETIONS)
    wanted = await undisturbed(rig, http, [case])
    # Otherwise the answer would begin at once, with what the undisturbed one left in the prefix cache.
    fresh = Case({**case.body, "cache_salt": "a"}, COMPLETIONS)
    async with asked(rig, http, fresh) as (answer, session):
        worker = await worker_of(rig, http, session)
        await until(lambda: prefilling(rig, worker), "it was not seen to prefill")
        assert kill_worker(worker["pid"], Victim.TREE)
        got = await answer
        [outcome] = (await told(rig, http, session))["outcomes"]
    assert outcome["outcome"] == "restarted", outcome
    require_same([case], wanted, [got], outcomes=("restarted",))


async def test_the_second_worker_dies_too_and_the_first_that_is_back_goes_on(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    case = Case(chat(STORY, temperature=0.9, seed=5, presence_penalty=0.4, max_tokens=60))
    wanted = await undisturbed(rig, http, [case])
    due = [15, 35]
    killed: list[str] = []

    async def kill() -> None:
        worker = await rig.sidecar.serving(http)
        killed.append(worker["name"])
        kill_worker(worker["pid"], Victim.TREE)

    def at_cuts(answer: Answer) -> Any:
        if due and len(answer.token_ids) >= due[0]:
            due.pop(0)
            return asyncio.create_task(kill())
        return None

    async with asked(rig, http, case, at_cuts) as (answer, session):
        got = await answer
        outcomes = (await told(rig, http, session))["outcomes"]
    assert len(set(killed)) == 2, killed
    assert [o["outcome"] for o in outcomes] == ["exact", "exact"], outcomes
    require_same([case], wanted, [got], takeovers=2)


async def test_a_worker_that_dies_while_it_takes_a_session_up_leaves_it_to_the_next(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    case = Case(chat(STORY, temperature=0.9, seed=6, max_tokens=50))
    wanted = await undisturbed(rig, http, [case])
    reached = asyncio.Event()

    def at_cut(answer: Answer) -> None:
        if len(answer.token_ids) >= 15:
            reached.set()

    async with asked(rig, http, case, at_cut) as (answer, session):
        await reached.wait()
        first = await worker_of(rig, http, session)
        second = next(w for w in await rig.sidecar.workers(http) if w["name"] != first["name"])
        # Stopped, it gets the session and cannot be done with taking it up.
        core = next(p for p in psutil.Process(second["pid"]).children(recursive=True) if "EngineCore" in p.name())
        core.send_signal(signal.SIGSTOP)
        kill_worker(first["pid"], Victim.TREE)

        async def placed() -> bool:
            return bool((await told(rig, http, session))["generation"] == 2)

        await until(placed, "nobody was to take it up")
        kill_worker(second["pid"], Victim.TREE)
        got = await answer
        outcomes = (await told(rig, http, session))["outcomes"]
    assert [o["outcome"] for o in outcomes] == ["interrupted", "exact"], outcomes
    assert outcomes[-1]["tokens_recomputed"] == 1, outcomes
    # A takeover that came to nothing is no pause of its own: the client has had one.
    require_same([case], wanted, [got], takeovers=1)
