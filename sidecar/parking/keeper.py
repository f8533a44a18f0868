"""Keeps one group: runs its state machine, makes its calls through helpers, writes its record, and watches its ranks.

Owns the helpers, the timer and the pidfds of the ranks; decides nothing that `machine.py` can decide. Invariants: a
state is in the journal before what it is about is done; nothing is awaited without an end; a rank that dies is noticed
in every state. Use it within the group's lock (`Journal.lock`), whose descriptor the helpers inherit.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...adapters.cuda_checkpoint.driver import DriverError, Op, ProcessState
from ...adapters.cuda_checkpoint.helper import CUDA
from ...adapters.cuda_checkpoint.machine import (
    RESTING,
    Action,
    AllGone,
    Call,
    CancelAsked,
    Check,
    Did,
    Died,
    Event,
    Failed,
    Forget,
    HelperLost,
    Kill,
    Life,
    Limits,
    Look,
    ParkAsked,
    ParkState,
    Quiesce,
    Refused,
    Save,
    States,
    TellState,
    Tick,
    UnparkAsked,
    Wake,
    Went,
    adopted,
    step,
)
from ...adapters.cuda_checkpoint.preflight import Rank, full_map, park_refusals, restore_refusals
from ...session.errors import MidstreamError, ParkError
from ..processes import Process, open_pidfd, read_process, send
from .facts import host_of, rank_of
from .guests import Guest
from .helpers import HelperEnded, RankHelper
from .journal import Entry, Journal, ParkedRank

_LOG = logging.getLogger("midstream.parking")
LOOK_EVERY_S = 0.1
# One question to the driver while it is looked after; a call may be under way there.
ASK_S = 5.0
KILL_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a group came to rest; `text` says why it is not where it was to go. `seconds` of each state on the way."""

    state: ParkState
    text: str
    seconds: Mapping[str, float]


class Keeper:
    """One group.

    `moves`: for an unpark, which GPU becomes which. `free_bytes`: host memory, if the machine does not know.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        guest: Guest,
        journal: Journal,
        lock_fd: int,
        *,
        limits: Limits,
        driver: str = CUDA,
        free_bytes: int | None = None,
        on_state: Callable[[ParkState, str], None] | None = None,
    ) -> None:
        self.name = name
        self._processes = list(processes)
        self._guest = guest
        self._journal = journal
        self._lock_fd = lock_fd
        self._limits = limits
        self._driver = driver
        self._free_bytes = free_bytes
        self._on_state = on_state
        self._life = Life(len(processes))
        self._entry = Entry(
            name, ParkState.RUNNING, tuple(ParkedRank(p.pid, p.started) for p in processes), time.time()
        )
        self._moves: Mapping[str, str] = {}
        self._helpers: dict[int, RankHelper] = {}
        self._before: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pidfds: dict[int, int] = {}
        self._rested = asyncio.Event()
        self._text = ""
        self._entered_s = time.monotonic()
        self._seconds: dict[str, float] = {}

    @property
    def state(self) -> ParkState:
        """Where the group is."""
        return self._life.state

    @property
    def entry(self) -> Entry:
        """Its record as it is now."""
        return self._entry

    @classmethod
    def of(cls, entry: Entry, guest: Guest, journal: Journal, lock_fd: int, **options: Any) -> "Keeper":
        """The keeper of a group that has a record."""
        processes = [_process_of(rank) for rank in entry.ranks]
        keeper = cls(entry.name, processes, guest, journal, lock_fd, **options)
        keeper._entry = entry
        return keeper

    # ---- asked

    async def park(self) -> Outcome:
        """Park it; returns where it came to rest."""
        return await self._until_rest(ParkAsked())

    async def unpark(self, moves: Mapping[str, str] | None = None) -> Outcome:
        """Bring it back, on other GPUs if `moves` says so."""
        self._moves = dict(moves or {})
        return await self._until_rest(UnparkAsked())

    async def adopt(self) -> Outcome:
        """Find out where it is, after its keeper was lost, and go on from there until it rests."""
        self._watch()
        life, actions = adopted(
            len(self._processes), self._entry.state, self._entry.refused, time.monotonic(), self._limits
        )
        self._life = life
        self._perform(actions)
        self._set_timer()
        self._look_for_the_dead()
        return await self._until_rest(None)

    def cancel(self) -> None:
        """Have a park come to nothing, if there is time for that."""
        self._happened(CancelAsked())

    async def close(self) -> None:
        """End what it has; the group stays as it is, and so does its record."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_helpers()
        for descriptor in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()

    async def _until_rest(self, event: Event | None) -> Outcome:
        if event is not None:
            self._watch()
            self._rested.clear()
            self._text = ""
            self._happened(event)
            self._look_for_the_dead()
        if self._life.state in RESTING:
            self._rested.set()
        await self._rested.wait()
        await self._end_helpers()
        return Outcome(self._life.state, self._text, dict(self._seconds))

    # ---- the machine

    def _happened(self, event: Event) -> None:
        self._life, actions = step(self._life, event, time.monotonic(), self._limits)
        self._perform(actions)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._life.deadline_s is not None:
            wait_s = max(self._life.deadline_s - time.monotonic(), 0.0)
            # A timer may ring a little early.
            self._timer = asyncio.get_running_loop().call_later(wait_s + 0.01, self._happened, Tick())

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TellState(state, text):
                    self._tell(state, text)
                case Kill():
                    self._begin(self._kill())
                case Forget():
                    self._journal.forget(self.name)
                    self._rested.set()
                case Check(turn, back):
                    self._begin(self._judged(turn, self._check_back if back else self._check))
                case Quiesce(turn):
                    self._begin(self._judged(turn, self._guest.quiesce))
                case Save(turn):
                    self._begin(self._judged(turn, self._save))
                case Wake(turn, proof):
                    self._begin(self._judged(turn, self._prove if proof else self._guest.wake))
                case Call(turn, op, ranks):
                    self._begin(self._call_all(turn, op, ranks))
                case Look(turn, goals, until_s):
                    self._begin(self._look(turn, goals, until_s))

    def _tell(self, state: ParkState, text: str) -> None:
        now_s = time.monotonic()
        left = self._entry.state
        self._seconds[left.value] = self._seconds.get(left.value, 0.0) + now_s - self._entered_s
        self._entered_s = now_s
        self._text = text or self._text
        self._entry = replace(self._entry, state=state, since=time.time(), refused=self._life.refused, text=text)
        level = logging.ERROR if state is ParkState.LOST else logging.INFO
        detail = f" ({text})" if text else ""
        _LOG.log(level, "event=parking name=%s state=%s%s", self.name, state.value, detail)
        if state not in (ParkState.RUNNING, ParkState.GONE):
            self._write()
        if self._on_state is not None:
            try:
                self._on_state(state, text)
            except Exception:
                _LOG.exception("name=%s callback for %s went wrong", self.name, state)
        if state is ParkState.LOST:
            self._guest.lost(text)
        if state in RESTING:
            self._rested.set()

    def _write(self) -> None:
        try:
            self._journal.write(self._entry)
        except ParkError as error:
            # Without a record nothing is begun; what is under way goes on, for standing still would help nobody.
            _LOG.error("event=journal name=%s error=%s", self.name, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start what the machine has asked for; what it asked for before is no longer wanted."""
        if self._work is not None and self._work is not asyncio.current_task():
            self._work.cancel()
        self._work = task = asyncio.create_task(work, name=f"parking of {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("event=task_failed name=%s", self.name, exc_info=error)

    async def _judged(self, turn: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except MidstreamError as error:
            self._happened(Refused(turn, str(error)))
        except Exception as error:
            _LOG.exception("event=guest name=%s", self.name)
            self._happened(Refused(turn, f"{type(error).__name__}: {error}"))
        else:
            self._happened(Went(turn))

    # ---- checks

    async def _check(self) -> None:
        # Before anything is touched it is known whether there is a place for the record.
        self._journal.write(self._entry)
        host, ranks = await self._facts()
        self._entry = replace(
            self._entry,
            ranks=tuple(replace(r, gpus=dict(f.held)) for r, f in zip(self._entry.ranks, ranks, strict=True)),
            pairs={},
        )
        self._before = {gpu.uuid: gpu.free_bytes for gpu in host.gpus}
        if found := park_refusals(host, ranks):
            raise ParkError("; ".join(f"{r.reason.value}: {r.text}" for r in found))

    async def _check_back(self) -> None:
        host, ranks = await self._facts()
        try:
            pairs = full_map(host.gpus, self._moves)
        except ValueError as error:
            raise ParkError(str(error)) from None
        needed = [rank.gpus for rank in self._entry.ranks]
        if found := restore_refusals(host, ranks, needed, pairs):
            raise ParkError("; ".join(f"{r.reason.value}: {r.text}" for r in found))
        self._entry = replace(self._entry, pairs=pairs)

    async def _facts(self) -> tuple[Any, list[Rank]]:
        looks = await asyncio.gather(*(self._asked(rank, "look", self._limits.check_s) for rank in self._all()))
        host = host_of(looks[0], free_bytes=self._free_bytes)
        return host, [rank_of(p.pid, look) for p, look in zip(self._processes, looks, strict=True)]

    async def _asked(self, rank: int, op: str, within_s: float) -> Mapping[str, Any]:
        try:
            return await (await self._helper(rank)).ask(op, within_s)
        except HelperEnded as error:
            self._helpers.pop(rank, None)
            raise ParkError(f"the driver does not answer for process {self._processes[rank].pid}: {error}") from error
        except DriverError as error:
            raise ParkError(f"{error.code.lower()}: {error}") from error

    async def _prove(self) -> None:
        await self._guest.prove(self._entry.probe)

    async def _save(self) -> None:
        self._entry = replace(self._entry, probe=dict(await self._guest.save()))

    def _all(self) -> range:
        return range(len(self._processes))

    # ---- calls

    async def _helper(self, rank: int) -> RankHelper:
        helper = self._helpers.get(rank)
        if helper is None:
            process = self._processes[rank]
            helper = await RankHelper.started(process.pid, process.started, driver=self._driver, lock_fd=self._lock_fd)
            self._helpers[rank] = helper
        return helper

    async def _end_helpers(self) -> None:
        helpers, self._helpers = list(self._helpers.values()), {}
        await asyncio.gather(*(helper.end() for helper in helpers))

    async def _call_all(self, turn: int, op: Op, ranks: Sequence[int]) -> None:
        await asyncio.gather(*(self._call(turn, op, rank) for rank in ranks))

    async def _call(self, turn: int, op: Op, rank: int) -> None:
        left_s = max((self._life.deadline_s or time.monotonic()) - time.monotonic(), 0.1)
        more: dict[str, Any] = {}
        if op is Op.LOCK:
            more = {"timeout_ms": int(1000 * self._limits.lock_s)}
        elif op is Op.RESTORE:
            more = {"pairs": dict(self._entry.pairs)}
        try:
            helper = await self._helper(rank)
            await helper.ask(op.value, left_s, **more)
        except HelperEnded:
            self._helpers.pop(rank, None)
            self._happened(HelperLost(turn, rank))
        except DriverError as error:
            if error.code == "HELPER":
                self._happened(HelperLost(turn, rank))
            else:
                self._happened(Failed(turn, rank, error.code, str(error)))
        else:
            if op is Op.CHECKPOINT and not any(r.gpus for r in self._entry.ranks) and self._is_last():
                await self._measure()
            self._happened(Did(turn, rank))

    def _is_last(self) -> bool:
        """Whether all others are through this call."""
        return len(self._life.done) == self._life.ranks - 1

    async def _measure(self) -> None:
        """Where the driver does not tell what a process had: what has become free, all put down to the first rank."""
        with suppress(ParkError):
            look = await self._asked(0, "look", ASK_S)
            freed = {g["uuid"]: int(g["free_bytes"]) - self._before.get(g["uuid"], 0) for g in look["gpus"]}
            had = {uuid: size for uuid, size in freed.items() if size > 0}
            first, *others = self._entry.ranks
            self._entry = replace(self._entry, ranks=(replace(first, gpus=had), *others))

    async def _look(self, turn: int, goals: frozenset[ProcessState], until_s: float) -> None:
        await self._end_helpers()
        while True:
            states = tuple(await asyncio.gather(*(self._state(rank) for rank in self._all())))
            if any(set(states) == {goal} for goal in goals) or time.monotonic() >= until_s:
                break
            await asyncio.sleep(min(LOOK_EVERY_S, max(until_s - time.monotonic(), 0.0)))
        self._happened(States(turn, states))

    async def _state(self, rank: int) -> ProcessState | None:
        try:
            answer = await (await self._helper(rank)).ask("state", ASK_S)
            return ProcessState(answer["state"])
        except HelperEnded:
            self._helpers.pop(rank, None)
        except (DriverError, ValueError):
            pass
        return None

    # ---- ranks

    def _watch(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._pidfds and (descriptor := open_pidfd(process)) is not None:
                self._pidfds[rank] = descriptor
                asyncio.get_running_loop().add_reader(descriptor, self._died, rank)

    def _look_for_the_dead(self) -> None:
        for rank in self._all():
            if rank not in self._pidfds:
                self._say_dead(rank)

    def _died(self, rank: int) -> None:
        descriptor = self._pidfds.pop(rank)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._say_dead(rank)

    def _say_dead(self, rank: int) -> None:
        if self._life.state is ParkState.PREFLIGHT and not self._life.looking:
            return  # the check says it better
        self._happened(Died(f"process {self._processes[rank].pid} has ended"))

    async def _kill(self) -> None:
        await self._end_helpers()
        while True:
            left = [p for p in self._processes if _is_there(p)]
            if not left:
                break
            for process in left:
                with suppress(OSError):
                    send(process, signal.SIGKILL)
            await asyncio.sleep(KILL_EVERY_S if len(left) > 8 else 0.02)
        self._happened(AllGone())


def _process_of(rank: ParkedRank) -> Process:
    """The process of a record; one that has ended keeps its pid and start, and nothing is ever the same as it."""
    found = read_process(rank.pid)
    known = Process(rank.pid, rank.started, "", 0, 0)
    return found if found is not None and found.is_same(known) else known


def _is_there(process: Process) -> bool:
    return process.is_same(read_process(process.pid))
