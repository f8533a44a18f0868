"""Requests that are interrupted at a given token by a planned move, and read to the last field.

Owns the moment of the cut: where workers can, they hold still until the moves have been ordered, so that no answer is
over before it can be moved. What an answer says is read by `told.tell`, field by field; nothing here knows one
feature from another.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil

from midstream.loadtest.harness import SidecarProcess
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.session.ticket import worker_dir
from midstream.sidecar.control_client import ControlClient
from support.told import Told, differences, tell

Body = Mapping[str, Any]
Result = TypeVar("Result")
# Does something to a worker that has been stopped, and to what it holds of a session.
Harm = Callable[[dict[str, Any], str], Awaitable[None]]
ADMISSION_S = 60.0
MOVE_S = 120.0
ORDER_S = 2.0
TRIES = 8
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
REPORT = {"X-Midstream-Report": "1"}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: after how many outputs to move it (never, if none), and from where its KV is to come then.

    A request for several choices is so many `sessions`, each of which is moved.
    """

    body: Body
    ats: tuple[int, ...] = ()
    tier: str = "held"
    sessions: int = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """What a client has in the end, after how many outputs each move was made, and what the sidecar says came of it."""

    told: Told
    cuts: tuple[int, ...]
    outcomes: tuple[dict[str, Any], ...]
    sessions: tuple[SessionId, ...]

    @property
    def came_to(self) -> list[dict[str, Any]]:
        """The outcomes, but for those of takeovers that were interrupted themselves.

        A session whose old owner came to the end before its KV was copied is taken up again, for its ending.
        """
        return [outcome for outcome in self.outcomes if outcome["outcome"] != "interrupted"]

    @property
    def names(self) -> list[str]:
        """The names of what it came to."""
        return [outcome["outcome"] for outcome in self.came_to]


class Stage:
    """A sidecar with real workers, and its operator's socket. `quiet`: its engines can be told to take no step."""

    def __init__(
        self,
        process: SidecarProcess,
        http: aiohttp.ClientSession,
        control: ControlClient,
        model: str,
        *,
        quiet: bool,
        core: str = "",
    ) -> None:
        """`core`: part of the name of the process, below a worker's, that computes; "" if it is the worker's own."""
        self.process = process
        self.http = http
        self.control = control
        self.model = model
        self._quiet = quiet
        self._core = core
        self._ordered: asyncio.Future[list[BaseException | None]]

    # ---- requests

    async def tell(self, body: Body, **headers: str) -> Told:
        """An answer, streamed or not; token ids and usage are asked for unless the body says otherwise."""
        path = CHAT if "messages" in body else COMPLETIONS
        asked = {"model": self.model, "return_token_ids": True, **body}
        if asked.get("stream"):
            asked["stream_options"] = {"include_usage": True, **asked.get("stream_options", {})}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await tell(self.http, self.process.url + path, asked, on_headers=None, **{**REPORT, **named})

    async def moved(self, body: Body, *ats: int, tier: str = "held", **headers: str) -> Moved:
        """The answer to one request that is moved once it has as many outputs, again and again."""
        [moved] = await self.run(Ask(body, ats, tier), **headers)
        return moved

    async def run(self, *asks: Ask, **headers: str) -> list[Moved]:
        """Run requests side by side, and move each as it says."""
        await self.ready()
        running = []
        async with self.still():
            for ask in asks:
                asking, names = await self.begin(ask.body, ask.sessions, **headers)
                moving = [asyncio.create_task(self._move(name, ask, asking)) for name in names]
                running.append((asking, names, moving))
        async with asyncio.timeout(MOVE_S):
            for asking, _, moving in running:
                await asyncio.gather(asking, *moving)
        return [await self._ended(asking, names, moving) for asking, names, moving in running]

    async def moved_at(
        self, body: Body, at: int, *, harm: Harm | None = None, may_end: bool = False, **headers: str
    ) -> Moved:
        """The answer to a request that is moved after exactly so many outputs, or one more.

        Its worker is stopped there (and what it holds is harmed), and goes on when the answer is complete: nothing else
        must run. On a busy machine it may go too far, or be done, before it is stopped: then once more. `may_end`: an
        answer that is over then is as good.
        """
        for _ in range(TRIES):
            moved = await self._stopped_at(body, at, harm, headers)
            if (moved.cuts or may_end) and all(cut <= at + 1 for cut in moved.cuts):
                return moved
        raise AssertionError(f"{TRIES} times it had gone too far beyond token {at} before it was stopped")

    async def _stopped_at(self, body: Body, at: int, harm: "Harm | None", headers: dict[str, str]) -> Moved:
        await self.ready()
        async with self.still():
            asking, [name] = await self.begin(body, 1, **headers)
            workers = {w["name"]: w for w in await self.process.workers(self.http)}
            worker = workers[(await self.told(name))["worker"]]
            arena = worker_dir(self.process.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
            pid = self._computing(worker["pid"])
            given_up = threading.Event()
            stopping = asyncio.create_task(asyncio.to_thread(_stop_at, pid, arena, name, at, given_up))
        cuts = []
        try:
            async with asyncio.timeout(MOVE_S):
                await asyncio.shield(stopping)
                if harm is not None:
                    await harm(worker, name)
                try:
                    cuts.append(await self.control.move(name))
                    await asking
                except Refused as refused:
                    if refused.reason not in ("no_session", "ended"):
                        raise
        finally:
            # Whoever looks has stopped it by then, or never will: one that stays stopped fails all later tests.
            given_up.set()
            await asyncio.wait({stopping})
            os.kill(pid, signal.SIGCONT)
            await self._carried_out()
        told, outcomes = await asking, tuple((await self.told(name))["outcomes"])
        # Where nothing was taken up, the end of the answer overtook the move.
        return Moved(told, tuple(cuts) if outcomes else (), outcomes, (name,))

    def _computing(self, pid: int) -> int:
        if not self._core:
            return pid
        return next(p.pid for p in psutil.Process(pid).children(recursive=True) if self._core in p.name())

    async def _move(self, name: SessionId, ask: Ask, asking: "asyncio.Task[Told]") -> list[int]:
        if ask.tier == "disk":
            await self._when_possible(asking, ("no_snapshot", "session"), lambda: self.control.snapshot(name))
        # All of them are ordered at once: an answer must not be over before its last one is.
        return list(await asyncio.gather(*(self._moved_at(name, at, ask.tier, asking) for at in ask.ats)))

    async def _moved_at(self, name: SessionId, at: int, tier: str, asking: "asyncio.Task[Told]") -> int:
        # Busy: the move before this one is not over yet.
        return await self._when_possible(asking, ("busy",), lambda: self.control.move(name, tier=tier, at=at))

    async def _when_possible(
        self, asking: "asyncio.Task[Told]", not_yet: Sequence[str], ask: Callable[[], Awaitable[Result]]
    ) -> Result:
        while True:
            try:
                return await ask()
            except Refused as refused:
                if refused.reason not in not_yet or asking.done():
                    raise
            await asyncio.sleep(0.002)

    async def _ended(
        self, asking: "asyncio.Task[Told]", names: Sequence[SessionId], moving: Sequence["asyncio.Task[list[int]]"]
    ) -> Moved:
        sessions = {s["session"]: s for s in await self.process.sessions(self.http)}
        outcomes = tuple(outcome for name in names for outcome in sessions[name]["outcomes"])
        return Moved(asking.result(), tuple(cut for m in moving for cut in m.result()), outcomes, tuple(names))

    # ---- workers and sessions

    async def ready(self, limit_s: float = 240.0) -> None:
        """Wait until all workers are ready and no session is left."""
        deadline_s = time.monotonic() + limit_s
        while (await self.process.ask(self.http, "/midstream/v1/status")).get("sessions_open") != 0:
            assert time.monotonic() < deadline_s, "a session is left"
            await asyncio.sleep(0.02)
        await self.process.wait_ready(self.http, timeout_s=limit_s)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """While this lasts no worker takes a step, if they can be asked for that."""
        workers = await self.process.workers(self.http) if self._quiet else []
        try:
            for worker in workers:
                await self._order(f"{worker['url']}/midstream/quiesce")
            yield
        finally:
            # All of them, whatever one says: whoever stays quiet lets every later test wait for nothing.
            orders = [self._order(f"{worker['url']}/midstream/unquiesce") for worker in workers]
            self._ordered = asyncio.gather(*orders, return_exceptions=True)
            # One that is stopped at its next token may not come to its answer before it goes on.
            if (await asyncio.wait({self._ordered}, timeout=ORDER_S))[0]:
                await self._carried_out()

    async def _carried_out(self) -> None:
        """Whatever was ordered last; raises if it was not."""
        for failed in await self._ordered:
            if isinstance(failed, BaseException):
                raise failed

    async def _order(self, url: str) -> None:
        async with self.http.post(url) as answer:
            assert answer.status == 204, await answer.text()

    async def _sessions(self) -> set[str]:
        return {session["session"] for session in await self.process.sessions(self.http)}

    async def told(self, name: SessionId) -> dict[str, Any]:
        """What the sidecar says of a session."""
        return next(s for s in await self.process.sessions(self.http) if s["session"] == name)

    async def begin(
        self, body: Body, sessions: int = 1, **headers: str
    ) -> tuple["asyncio.Task[Told]", list[SessionId]]:
        """Send a request, and return when it has become so many sessions."""
        known = await self._sessions()
        asking = asyncio.create_task(self.tell(body, **headers))
        return asking, await self._new(known, sessions, asking)

    async def until(self, holds: Callable[[], Awaitable[bool]], limit_s: float = MOVE_S) -> None:
        """Look until something holds that the sidecar tells."""
        deadline_s = time.monotonic() + limit_s
        while not await holds():
            assert time.monotonic() < deadline_s, f"{holds} did not come true within {limit_s:g} s"
            await asyncio.sleep(0.01)

    async def _new(self, known: set[str], count: int, asking: "asyncio.Task[Told]") -> list[SessionId]:
        """The sessions of a request that has just been sent."""
        async with asyncio.timeout(ADMISSION_S):
            while len(new := sorted(await self._sessions() - known)) < count:
                assert not asking.done(), f"the request became no session: {asking.result()}"
                await asyncio.sleep(0.01)
        return [SessionId(name) for name in new]


def _stop_at(pid: int, arena: Path, session: SessionId, outputs: int, given_up: threading.Event) -> None:
    """SIGSTOP a worker when a session has so many outputs. Shared memory makes no noise, so this has to look."""
    deadline_s = time.monotonic() + MOVE_S
    with closing(ArenaReader(arena)) as reader:
        while time.monotonic() < deadline_s and not given_up.is_set():
            slot = reader.find(session)
            if slot is not None and (slot.state is not SlotState.LIVE or len(reader.journal(slot)) >= outputs):
                os.kill(pid, signal.SIGSTOP)
                return
            time.sleep(0.0002)
    raise AssertionError(f"no token {outputs} within {MOVE_S:g} s")


def require_equal(got: Told, wanted: Told, *, within: float = 0.0, one_time: bool = True) -> None:
    """No reader could tell the two apart, whatever they look at. `within`: but for so much in logprobs.

    `one_time`: all chunks of an answer have the time of its beginning, and not each its own.
    """
    for told in (got, wanted):
        assert (told.status, told.done, told.error) == (200, True, None)
    assert differences(wanted, got, within=within) == []
    require_one_answer(got, one_time=one_time)


def require_one_answer(told: Told, *, one_time: bool = True) -> None:
    """What holds of every answer: one name and time, one role and one ending a choice, and usage at most once."""
    assert len({(chunk["id"], chunk["object"]) for chunk in told.chunks}) == 1
    times = [chunk["created"] for chunk in told.chunks]
    # Where each has its own, those of whoever goes on have that of the beginning.
    assert set(times) == {times[0]} if one_time else min(times) == times[0]
    choices = [choice for chunk in told.chunks for choice in chunk["choices"]]
    for index in {choice["index"] for choice in choices}:
        of_one = [choice for choice in choices if choice["index"] == index]
        assert [c["finish_reason"] is not None for c in of_one] == [False] * (len(of_one) - 1) + [True]
        if "delta" in of_one[0]:
            assert sum(c["delta"].get("role") is not None for c in of_one) == 1
    assert sum(not chunk["choices"] for chunk in told.chunks) <= 1


def pieces(told: Told) -> list[tuple[int, str]]:
    """Of a stream with token ids: how many outputs there were after each chunk that brought some, and its text."""
    count, found = 0, []
    for chunk in told.chunks:
        for choice in chunk["choices"]:
            if ids := choice.get("token_ids"):
                count += len(ids)
                found.append((count, choice.get("text") or choice.get("delta", {}).get("content") or ""))
    return found


def seam(told: Told, *, after: int) -> tuple[int, str]:
    """A place in a stream and the printable text around it, which occurs here for the first time: something to stop at.

    Of the text the first half comes before the place, and the rest after it.
    """
    told_of, text = pieces(told), ""
    for index, (count, said) in enumerate(told_of):
        before = text[-HALF:]
        behind = "".join(more for _, more in told_of[index : index + 2 * HALF])[:HALF]
        around = before + behind
        if count > after and said and around.isascii() and len(around) == 2 * HALF and around.isprintable():
            whole = told.text("text") or told.text("content")
            if whole.find(around) == len(text) - HALF:
                return count - 1, around
        text += said
    raise AssertionError(f"no text to stop at after {after} tokens: {text!r}")


HALF = 3
