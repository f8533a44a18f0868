"""Deaths at bad moments, of real engines: in a prefill, in a restore, of both workers, and of one session twice."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.ids import SessionId
from midstream.session.ticket import worker_dir
from support.moving import Body, Stage, require_equal
from support.told import Told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

WAIT_S = 90.0
BODY: dict[str, Any] = {
    "prompt": "Many things may happen, and one after the other",
    "temperature": 0.9,
    "seed": 5,
    "presence_penalty": 0.4,
    "max_tokens": 150,
    "stream": True,
}
# Nearly all of the context: several pieces, each of which takes a moment.
LONG_PROMPT = "xy" * 900


class Asked:
    """A running request, and the worker that has it."""

    def __init__(self, stage: Stage, answer: "asyncio.Task[Told]", session: SessionId) -> None:
        self._stage = stage
        self.answer = answer
        self.session = session

    async def told(self) -> dict[str, Any]:
        """What the sidecar says of the session."""
        return await self._stage.told(self.session)

    async def worker(self) -> dict[str, Any]:
        """The worker that has the session now, once it is known that it has it."""
        name = (await self.told())["worker"]
        return next(w for w in await self._stage.process.workers(self._stage.http) if w["name"] == name)

    def journaled(self, worker: dict[str, Any]) -> int | None:
        """How many outputs a worker has journaled of the session; None if it has no record of it."""
        path = worker_dir(self._stage.process.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
        with closing(ArenaReader(path)) as arena:
            slot = arena.find(self.session)
            return None if slot is None or slot.state is not SlotState.LIVE else len(arena.journal(slot))

    def journal(self, worker: dict[str, Any]) -> list[int]:
        """All outputs that a worker has journaled of the session as its first owner."""
        path = worker_dir(self._stage.process.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
        with closing(ArenaReader(path)) as arena:
            slot = arena.find(self.session, 1)
            return [] if slot is None else list(arena.journal(slot))

    async def reaches(self, worker: dict[str, Any], outputs: int) -> None:
        """Wait until a worker has journaled so much. Shared memory makes no noise, so this has to look."""
        await until(lambda: (self.journaled(worker) or 0) >= outputs, f"no token {outputs}")


async def until(holds: Callable[[], bool], what: str) -> None:
    """Look until something holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} within {WAIT_S:g} s"
        await asyncio.sleep(0.0005)


@asynccontextmanager
async def asked(stage: Stage, body: Body) -> AsyncIterator[Asked]:
    """A request that has just become a session, of which no step has been taken when this begins."""
    await stage.ready()
    async with stage.still():
        answer, [session] = await stage.begin(body)
    try:
        yield Asked(stage, answer, session)
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


def kill(worker: dict[str, Any]) -> None:
    """SIGKILL a worker."""
    assert kill_worker(worker["pid"], Victim.TREE)


async def names(request: Asked) -> list[str]:
    """The outcomes of a session that is over."""
    return [outcome["outcome"] for outcome in (await request.told())["outcomes"]]


async def test_a_death_during_the_prefill_costs_nothing_but_time(stage: Stage) -> None:
    body = {**BODY, "prompt": LONG_PROMPT, "max_tokens": 40}
    wanted = await stage.tell(body)
    async with asked(stage, body) as request:
        worker = await request.worker()
        await until(lambda: request.journaled(worker) is not None, "it did not begin")
        os.kill(worker["pid"], signal.SIGSTOP)
        journaled = request.journaled(worker)
        kill(worker)
        got = await request.answer
        assert await names(request) == ["restarted" if journaled == 0 else "exact"]
    assert journaled == 0, "it was done with its prompt"
    require_equal(got, wanted)


async def test_two_deaths_in_one_session_and_the_second_leaves_nobody_for_a_while(stage: Stage) -> None:
    wanted = await stage.tell(BODY)
    async with asked(stage, BODY) as request:
        killed = []
        for outputs in (20, 60):
            worker = await request.worker()
            await request.reaches(worker, outputs)
            kill(worker)
            killed.append(worker["name"])

            async def elsewhere(old: str = worker["name"]) -> bool:
                told = await request.told()
                return bool(told["worker"] != old or told["generation"] > len(killed))

            await stage.until(elsewhere)
        got = await request.answer
        assert await names(request) == ["exact", "exact"]
    assert len(set(killed)) == 2, "the standby died after the first one"
    require_equal(got, wanted)


async def test_both_workers_die_at_once_and_the_first_that_is_back_goes_on(stage: Stage) -> None:
    wanted = await stage.tell(BODY)
    async with asked(stage, BODY) as request:
        worker = await request.worker()
        await request.reaches(worker, 30)
        for each in await stage.process.workers(stage.http):
            kill(each)
        got = await request.answer
        # The second one may be found dead only when the session was already given to it.
        assert await names(request) in (["exact"], ["interrupted", "exact"])
    require_equal(got, wanted)


async def test_a_worker_that_dies_while_it_takes_a_session_up_leaves_it_to_the_next(stage: Stage) -> None:
    wanted = await stage.tell(BODY)
    async with asked(stage, BODY) as request:
        first = await request.worker()
        second = next(w for w in await stage.process.workers(stage.http) if w["name"] != first["name"])
        await request.reaches(first, 20)
        # Stopped, it is given the session and cannot be done with taking it up.
        os.kill(second["pid"], signal.SIGSTOP)
        kill(first)

        async def placed() -> bool:
            return bool((await request.told())["generation"] == 2)

        await stage.until(placed)
        kill(second)
        got = await request.answer
        assert await names(request) == ["interrupted", "exact"]
    require_equal(got, wanted)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_unseeded_answer_goes_on_with_the_seed_that_it_began_with(stage: Stage, stream: bool) -> None:
    body = {**BODY, "seed": None, "stream": stream, "max_tokens": 300}
    async with asked(stage, body) as request:
        first = await request.worker()
        second = next(w for w in await stage.process.workers(stage.http) if w["name"] != first["name"])
        # Stopped, it cannot take the session up, and the first worker goes on for a while.
        os.kill(second["pid"], signal.SIGSTOP)
        cut = await stage.control.move(request.session, at=20)
        await request.reaches(first, cut + 12)
        os.kill(second["pid"], signal.SIGCONT)
        got = await request.answer
        assert await names(request) == ["exact"]
        stayed = request.journal(first)
    assert len(stayed) >= cut + 12
    assert got.ids[: len(stayed)] == stayed, "what both workers said after the cut is the same"
    assert len(got.ids) == 300
    other = await stage.tell(body)
    assert other.ids != got.ids, "each unseeded answer is another one"
