"""One pass: the load of one strategy from its first request to its last, with its faults beside it.

Owns what runs at the same time (load, faults, looks at processes and sessions) and its end: nothing is left running.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ...session.errors import EngineError
from ..harness import SidecarProcess
from . import figures
from .arrivals import Arrival
from .drive import Driver, Pace
from .live import Live
from .records import Record, record_of
from .resources import Resources
from .sender import Route, Sender
from .strike import Logged, Striker
from .workload import COMPLETIONS, Ask

SESSIONS_EVERY_S = 1.0
TELL_EVERY_S = 1.0
ALIVE_EVERY_S = 0.5
# Outcomes are told for a moment after their streams' end.
LAST_LOOK_S = 5.0
# None of the prompts, so that no prefix cache knows them.
WARM_UP = "Once upon a time there was"


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass sends, and how patient its client is."""

    asks: Sequence[Ask]
    pace: Pace
    arrivals: Callable[[], Iterator[Arrival] | None]
    answer_s: float
    silence_s: float


@dataclass(slots=True)
class Passed:
    """What a pass came to."""

    name: str
    records: list[Record] = field(default_factory=list)
    faults: list[Logged] = field(default_factory=list)
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    duration_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Its figures."""
        return {
            **figures.throughput(self.records, self.duration_s),
            **figures.latencies(self.records),
            **figures.tokens(self.records),
            **figures.gaps(self.records),
            **figures.lateness(self.records),
            **figures.outcomes(self.sessions.values()),
            "faults": len(hit := {entry.number for entry in self.faults if entry.hit}),
            "faults_missed": len({entry.number for entry in self.faults} - hit),
            "processes": self.resources,
        }


class Pass:
    """Runs one."""

    def __init__(
        self,
        name: str,
        load: Load,
        route: Route,
        http: aiohttp.ClientSession,
        *,
        sidecar: SidecarProcess | None = None,
        controls: Mapping[int, Sequence[Sequence[int]]] | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._name = name
        self._load = load
        self._route = route
        self._http = http
        self._sidecar = sidecar
        self._controls = controls or {}
        self._progress = progress
        self._sender = Sender(route, answer_s=load.answer_s, silence_s=load.silence_s)
        self._go_on: Callable[[], bool] = lambda: False
        self._driver = Driver(load.asks, load.pace, self._sender.send, go_on=lambda: self._go_on())
        self.passed = Passed(name)
        self._before: set[str] = set()

    def running(self) -> list[Live]:
        """Requests whose answer is not over."""
        return self._driver.running()

    async def warm_up(self, count: int) -> None:
        """Short requests that are not counted: an engine's first ones are of another kind."""
        body = {"model": self._load.asks[0].body["model"], "prompt": WARM_UP, "max_tokens": 4, "temperature": 0}
        lives = [Live(Ask(-1, COMPLETIONS, body, 4), 0, time.perf_counter()) for _ in range(count)]
        await asyncio.gather(*map(self._sender.send, lives))

    async def run(self, striker: Striker | None = None) -> Passed:
        """The pass, to its end. Where that is an error's, or a signal's, `passed` has what was through."""
        if striker is not None:
            self._go_on = lambda: not striker.is_done
        resources = Resources(self._pids)
        self._before = {str(s["session"]) for s in await self._told_sessions()}
        began_s = time.perf_counter()
        beside = [
            asyncio.create_task(resources.follow()),
            asyncio.create_task(self._follow_sessions()),
            asyncio.create_task(self._tell(striker)),
        ]
        striking = asyncio.create_task(striker.run(began_s)) if striker is not None else None
        ended_s = began_s
        try:
            try:
                await self._drive()
            finally:
                ended_s = time.perf_counter()
            if striker is not None and striking is not None:
                # Its faults are over, or the pass's limit is; what is stopped or slow is set going again.
                if not striker.is_done:
                    striking.cancel()
                with suppress(asyncio.CancelledError):
                    await striking
            await resources.look()
            await self._last_sessions()
        finally:
            every = [*beside, *([striking] if striking is not None else [])]
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)
            await self._sender.close()
            self._conclude(striker, resources, ended_s - began_s)
        return self.passed

    async def _drive(self) -> None:
        """The load, unless the sidecar itself is gone: then nothing that follows would mean anything."""
        load = asyncio.create_task(self._driver.run(self._load.arrivals()))
        try:
            while not load.done():
                await asyncio.wait({load}, timeout=ALIVE_EVERY_S)
                if self._sidecar is not None and not self._sidecar_is_alive():
                    raise EngineError(f"the sidecar has ended in the midst of it:\n{self._sidecar.last_lines()}")
            await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    def _sidecar_is_alive(self) -> bool:
        assert self._sidecar is not None
        return self._sidecar.process is not None and self._sidecar.process.poll() is None

    def _conclude(self, striker: Striker | None, resources: Resources, duration_s: float) -> None:
        passed = self.passed
        passed.duration_s = duration_s
        passed.faults = striker.log if striker is not None else []
        passed.resources = resources.told(duration_s)
        passed.records = [
            record_of(
                live,
                strategy=self._name,
                began_s=self._driver.began_s,
                controls=self._controls.get(live.ask.index, ()),
                fault_times_s=[entry.clock_s for entry in passed.faults if entry.concerns(live.session)],
                outcomes=passed.sessions.get(live.session, {}).get("outcomes", ()),
            )
            for live in self._driver.lives
            if live.sent_s
        ]

    # ---- looks at the sidecar

    async def _pids(self) -> dict[str, int]:
        if self._sidecar is None or self._sidecar.process is None:
            return {}
        told = await self._sidecar.ask(self._http, "/midstream/v1/status")
        found = {"sidecar": self._sidecar.process.pid}
        for name in ("holder", "mover"):
            pid = (told.get(name) or {}).get("pid")
            if isinstance(pid, int):
                found[name] = pid
        return found

    async def _told_sessions(self) -> list[dict[str, Any]]:
        return [] if self._sidecar is None else await self._sidecar.sessions(self._http)

    async def _follow_sessions(self) -> None:
        while True:
            await self._keep_sessions()
            await asyncio.sleep(SESSIONS_EVERY_S)

    async def _keep_sessions(self) -> None:
        """The sidecar forgets sessions after a while; here they are kept."""
        for session in await self._told_sessions():
            if session["session"] not in self._before:
                self.passed.sessions[str(session["session"])] = session

    async def _last_sessions(self) -> None:
        deadline_s = time.monotonic() + LAST_LOOK_S
        while True:
            told = await self._told_sessions()
            is_over = all(s.get("state") in ("finished", "failed", "refused", "cancelled") for s in told)
            if is_over or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        await self._keep_sessions()

    async def _tell(self, striker: Striker | None) -> None:
        while True:
            lives = self._driver.lives
            done = sum(live.ended_s is not None for live in lives)
            tokens = sum(len(live.tokens) for live in lives)
            struck = f", {sum(e.hit for e in striker.log)} faults" if striker is not None else ""
            self._progress(f"{self._name}: {len(lives)} sent, {done} answered, {tokens} tokens{struck}")
            await asyncio.sleep(TELL_EVERY_S)
