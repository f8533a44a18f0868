"""Does what the fault plan says: waits until a fault can hit running streams, strikes, and logs what was hit.

Owns the faults of one pass and their log. A fault strikes only while all workers are ready (there is a standby, or the
epoch that a restart has brought), and where streams are being decoded: all of the worker's, or after `PATIENCE_S` at
least one. What could not be done is logged with its reason, and never left out.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from ...session.errors import EngineError
from ..harness import SidecarProcess, Victim, kill_worker
from .arenas import Arenas, Writing
from .fault_plan import ENDS_EPOCH, Fault, Kind, Plan
from .live import Live
from .relay import ask

LOOK_S = 0.02
PATIENCE_S = 30.0
AIM_S = 300.0
BACK_S = 600.0
# A stream that is about to end would be over before anybody could notice.
LEFT_MIN = 8
HIT_WITHIN_S = 5.0
SHOTS_MAX = 6

_VICTIMS = {Kind.KILL_CORE: Victim.CORE, Kind.KILL_WORKER: Victim.ROOT, Kind.KILL_TREE: Victim.TREE}


@dataclass(slots=True)
class Logged:
    """One entry of the fault log. `at_s` counts from the pass's beginning, `planned_s` is the plan's time."""

    number: int
    kind: str
    planned_s: float
    at_s: float
    time: str
    worker: str
    hit: bool
    decoding: int
    prefilling: int
    sessions: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    detail: str = ""
    # Sessions that this worker's arena had no room for, until then.
    arena_full: int = 0
    clock_s: float = 0.0

    def concerns(self, session: str) -> bool:
        """Whether it hit a stream, as far as is known: without a session any that ran may have been hit."""
        return self.hit and (not session or not self.sessions or session in self.sessions)

    def told(self) -> dict[str, Any]:
        """Without the clock of this process, which means nothing elsewhere."""
        said = asdict(self)
        del said["clock_s"]
        return said


@dataclass(frozen=True, slots=True)
class Aim:
    """A worker, and what it is writing. `known` is False where its streams are no sessions: then all that run count."""

    worker: dict[str, Any]
    writing: tuple[Writing, ...]
    known: bool


class Striker:
    """The faults of one pass."""

    def __init__(
        self,
        plan: Plan,
        sidecar: SidecarProcess,
        http: aiohttp.ClientSession,
        running: Callable[[], Sequence[Live]],
        *,
        seed: int,
        are_sessions: bool,
        relays: Path | None,
        on_log: Callable[[Logged], None] = lambda entry: None,
    ) -> None:
        self._plan = plan
        self._sidecar = sidecar
        self._http = http
        self._running = running
        self._chance = Random(f"{seed}/aim")
        self._are_sessions = are_sessions
        self._relays = relays
        self._on_log = on_log
        self._arenas = Arenas(sidecar.state_dir)
        self._ended: dict[str, int] = {}
        self._mending: set[asyncio.Task[None]] = set()
        self._began_s = 0.0
        self.is_done = not plan.faults
        self.log: list[Logged] = []

    async def run(self, began_s: float) -> None:
        """All faults, one after the other; `began_s` is the pass's beginning."""
        self._began_s = began_s
        try:
            for fault in self._plan.faults:
                await asyncio.sleep(max(began_s + fault.at_s - time.perf_counter(), 0.0))
                await self._until_hit(fault)
            self.is_done = True
            await asyncio.gather(*self._mending)
        except (EngineError, OSError, psutil.Error) as error:
            last = self.log[-1] if self.log else None
            # A strike that failed has said so itself.
            if last is None or last.detail != _reason(error):
                self._on_log(self._entry(last.number + 1 if last else 1, "none", 0.0, None, detail=_reason(error)))
        finally:
            # Whatever is wrong with the faults, the load must not go on for ever.
            self.is_done = True
            for task in self._mending:
                task.cancel()
            await asyncio.gather(*self._mending, return_exceptions=True)
            self._arenas.close()

    async def _until_hit(self, fault: Fault) -> None:
        missed: set[str] = set()
        for _ in range(SHOTS_MAX):
            await self._all_ready()
            aim = await self._aim(fault, missed)
            if aim is None:
                detail = "nothing was being decoded"
                self._on_log(self._entry(fault.number, fault.kind, fault.at_s, None, detail=detail))
                return
            before = self._broken()
            entry = await self._strike(fault, aim)
            if aim.known or fault.kind not in ENDS_EPOCH or await self._was_hit(before):
                return
            entry.hit, entry.detail = False, "the streams were on another worker; once more"
            missed = {entry.worker}

    async def _all_ready(self) -> None:
        """Wait until what was ended is there again, and everybody is ready."""
        deadline_s = time.monotonic() + BACK_S
        while True:
            workers = {w["name"]: w for w in await self._sidecar.workers(self._http)}
            if all(workers.get(name, {}).get("epoch", 0) > epoch for name, epoch in self._ended.items()):
                break
            if time.monotonic() > deadline_s:
                raise EngineError(f"what was killed did not come back within {BACK_S:g} s; see the sidecar's log")
            await asyncio.sleep(LOOK_S * 5)
        self._ended.clear()
        await self._sidecar.wait_ready(self._http, timeout_s=BACK_S)

    async def _aim(self, fault: Fault, missed: Collection[str]) -> Aim | None:
        """A worker that decodes, rather none where nothing was hit; None when nobody decoded for long."""
        began_s = time.monotonic()
        workers = [
            w
            for w in await self._sidecar.workers(self._http)
            if w["state"] == "ready" and fault.worker in (None, w["name"])
        ]
        self._chance.shuffle(workers)
        workers.sort(key=lambda worker: worker["name"] in missed)
        # The load may be asleep between two arrivals.
        while workers and time.monotonic() < began_s + AIM_S:
            patient = time.monotonic() < began_s + PATIENCE_S
            for worker in workers:
                aim = Aim(worker, tuple(self._arenas.writing(worker)), self._are_sessions)
                decoding, prefilling = self._counts(aim)
                if decoding and not (patient and prefilling):
                    return aim
            await asyncio.sleep(LOOK_S)
        return None

    def _counts(self, aim: Aim) -> tuple[int, int]:
        """How many streams of a worker are being decoded with enough to come, and how many have no token yet."""
        running = self._running()
        if not aim.known:
            return sum(live.is_decoding and live.left >= LEFT_MIN for live in running), sum(
                not live.tokens for live in running
            )
        lives = {live.session: live for live in running if live.session}
        decoding = [w for w in aim.writing if w.is_decoding and _has_some_and_more(lives.get(w.session), w.outputs)]
        return len(decoding), sum(not w.is_decoding for w in aim.writing)

    def _broken(self) -> int:
        return sum(len(live.broken_s) for live in self._running())

    async def _was_hit(self, before: int) -> bool:
        deadline_s = time.monotonic() + HIT_WITHIN_S
        while time.monotonic() < deadline_s:
            if self._broken() > before:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _strike(self, fault: Fault, aim: Aim) -> Logged:
        """Do it. The entry is made before, for what it says of the streams, and is a hit only once it was done."""
        entry = self._entry(fault.number, fault.kind, fault.at_s, aim)
        try:
            await self._do(fault, aim, entry)
            entry.hit = True
        except (EngineError, OSError, psutil.Error) as error:
            entry.detail = _reason(error)
            raise
        finally:
            self._on_log(entry)
        return entry

    async def _do(self, fault: Fault, aim: Aim, entry: Logged) -> None:
        pid = self._engine_pid(aim.worker)
        if fault.kind in ENDS_EPOCH:
            self._ended[entry.worker] = int(aim.worker["epoch"])
        match fault.kind:
            case Kind.KILL_CORE | Kind.KILL_WORKER | Kind.KILL_TREE:
                entry.processes = kill_worker(pid, _VICTIMS[fault.kind])
            case Kind.TERM:
                os.kill(pid, signal.SIGTERM)
                entry.processes = [str(pid)]
            case Kind.STOP:
                stopped = _send(_tree(pid), signal.SIGSTOP)
                entry.processes = [f"{p.name()}:{p.pid}" for p in stopped]
                self._mend(_go_on(stopped, fault.for_s))
            case Kind.NET_CUT | Kind.NET_SLOW:
                assert self._relays is not None
                request = {"op": "cut" if fault.kind is Kind.NET_CUT else "slow", "for_s": fault.for_s}
                request |= {"delay_s": fault.delay_s, "bytes_per_s": fault.bytes_per_s}
                await ask(self._relays, int(str(aim.worker["url"]).rsplit(":", 1)[1]), request)
                self._mend(asyncio.sleep(fault.for_s))

    def _engine_pid(self, worker: dict[str, Any]) -> int:
        """The engine's root process: the relay in front of it is none of its processes."""
        pid = int(worker["pid"])
        if self._relays is None:
            return pid
        children = psutil.Process(pid).children()
        return children[0].pid if children else pid

    def _mend(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    def _entry(self, number: int, kind: str, planned_s: float, aim: Aim | None, *, detail: str = "") -> Logged:
        """A line of the log, of what has not hit yet."""
        now_s = time.perf_counter()
        decoding, prefilling = self._counts(aim) if aim is not None else (0, 0)
        entry = Logged(
            number=number,
            kind=str(kind),
            planned_s=planned_s,
            at_s=round(now_s - self._began_s, 3),
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            worker=str(aim.worker["name"]) if aim is not None else "",
            hit=False,
            decoding=decoding,
            prefilling=prefilling,
            sessions=[w.session for w in aim.writing] if aim is not None else [],
            detail=detail,
            arena_full=self._arenas.counters(aim.worker).get("arena_full", 0) if aim is not None else 0,
            clock_s=now_s,
        )
        self.log.append(entry)
        return entry


def _reason(error: Exception) -> str:
    """One line of what an error says; its kind, where it says nothing."""
    return (str(error) or repr(error)).splitlines()[0]


def _has_some_and_more(live: Live | None, outputs: int) -> bool:
    """Whether a stream's client has a token already, and more are to come; a stream that is not known may."""
    return live is None or (bool(live.tokens) and live.ask.output_tokens - outputs >= LEFT_MIN)


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _send(processes: Sequence[psutil.Process], number: int) -> list[psutil.Process]:
    reached = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            reached.append(process)
    return reached


async def _go_on(stopped: Sequence[psutil.Process], after_s: float) -> None:
    try:
        await asyncio.sleep(after_s)
    finally:
        # Also when the pass ends early: nobody must stay stopped.
        _send(stopped, signal.SIGCONT)
