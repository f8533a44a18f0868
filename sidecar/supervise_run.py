"""Runs the life of one engine: starts its processes, watches them, asks for its health, ends them.

Owns the engine's processes; decides nothing that `supervise.py` can decide. Invariant: when `stop` has returned,
nothing of the engine is left. Each start is a new epoch whose command is made by `prepare`, so that each gets an arena
of its own.
"""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from ..session.errors import EngineError, LifelineError, MidstreamError
from ..session.lifeline import Holder
from .engine_log import EngineLog
from .lifeline_watch import LifelineWatch, Watched
from .process_watch import Death, TreeWatch
from .processes import Process, dies_with_parent, read_child, say_status, send, tidies_up
from .supervise import (
    BecameHealthy,
    Died,
    DrainAsked,
    Event,
    Gone,
    KillTree,
    Life,
    Policy,
    Spawn,
    StartAsked,
    StopAsked,
    TellDeath,
    TellState,
    Tick,
    WorkerState,
    step,
)

T = TypeVar("T")

_LOG = logging.getLogger("midstream.supervise")
_HEALTH_PAUSE_S = 0.1
_HEALTH_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
# A process that has been there for as long as this is part of the engine, not a compiler that it called.
_ESTABLISHED_S = 10.0
_KILL_TRIES = 60
_KILL_PAUSE_S = 0.5
# How long the last lines of a dead engine are waited for.
_LAST_LINES_S = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one epoch of an engine.

    `env` is the whole environment; `url` is where it will listen; `lifeline` is the file that its processes may hold.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str
    lifeline: Path | None = None


@dataclass(frozen=True, slots=True)
class EpochDeath:
    """An epoch of a worker is dead."""

    worker: str
    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class StateChange:
    """A worker is in a new state; `pid` is its root process, while it has one."""

    worker: str
    epoch: int
    state: WorkerState
    text: str
    pid: int | None


class Supervised:
    """One engine. Callbacks run in the event loop, in the order in which things happened, and must not block."""

    def __init__(
        self,
        worker: str,
        prepare: Callable[[int], Awaitable[Command]],
        policy: Policy,
        *,
        on_death: Callable[[EpochDeath], None],
        on_state: Callable[[StateChange], None],
        lifelines: LifelineWatch | None = None,
    ) -> None:
        self.worker = worker
        self._prepare = prepare
        self._policy = policy
        self._on_death = on_death
        self._on_state = on_state
        self._life = Life()
        self._log = EngineLog(worker)
        self._popen: subprocess.Popen[bytes] | None = None
        self._watch: TreeWatch | None = None
        self._lifelines = lifelines
        self._lifeline: Watched | None = None
        # Of the process whose end began the present one: how it ended is known later.
        self._ending_pid: int | None = None
        self._established: set[Process] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch_tasks: list[asyncio.Task[None]] = []
        # An epoch is ended only after its start is through: else a stop could overtake it and leave processes behind.
        self._at_work = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        """Where the engine is in its life."""
        return self._life.state

    @property
    def epoch(self) -> int:
        """The number of the current start, 0 before the first."""
        return self._life.epoch

    @property
    def pid(self) -> int | None:
        """The root process, while there is one."""
        return None if self._popen is None else self._popen.pid

    def processes(self) -> list[Process]:
        """The living processes of the engine, its root first."""
        return [] if self._watch is None else self._watch.living()

    def start(self) -> None:
        """Begin the first epoch; a failed worker is started again."""
        self._happened(StartAsked())

    def drain(self) -> None:
        """Take the engine out of service; it goes on with what it has."""
        self._happened(DrainAsked())

    async def stop(self) -> None:
        """End the engine and wait until nothing of it is left."""
        self._happened(StopAsked())
        await self._until(lambda: self._life.state is WorkerState.STOPPED)

    async def wait_ready(self) -> None:
        """Wait until the engine is ready. EngineError when it has failed or was stopped meanwhile."""
        await self._until(lambda: self._life.state in (WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED))
        if self._life.state is not WorkerState.READY:
            raise EngineError(f"worker {self.worker} is {self._life.state.value}{self._log.last_text()}")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _happened(self, event: Event) -> None:
        self._life, actions = step(self._life, event, time.monotonic(), self._policy)
        for action in actions:
            match action:
                case Spawn(epoch):
                    self._spawn_task(self._spawn(epoch), f"start of {self.worker}/{epoch}")
                case KillTree(epoch, grace_s):
                    self._spawn_task(self._kill(epoch, grace_s), f"end of {self.worker}/{epoch}")
                case TellDeath(epoch, text):
                    self._call(self._on_death, EpochDeath(self.worker, epoch, text))
                case TellState(state, text):
                    self._tell(state, text)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._life.deadline_s is not None:
            wait_s = max(self._life.deadline_s - time.monotonic(), 0)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._happened, Tick())
        self._changed.set()

    def _tell(self, state: WorkerState, text: str) -> None:
        level = logging.ERROR if state in (WorkerState.DEAD, WorkerState.FAILED) else logging.INFO
        detail = f" ({text})" if text else ""
        lines = self._log.last_text() if state is WorkerState.FAILED else ""
        _LOG.log(level, "worker=%s epoch=%d state=%s%s%s", self.worker, self._life.epoch, state.value, detail, lines)
        self._call(self._on_state, StateChange(self.worker, self._life.epoch, state, text, self.pid))

    def _call(self, callback: Callable[[T], None], argument: T) -> None:
        # Whatever goes wrong in a callback, the engine's life goes on: an action left out would leave it stuck.
        try:
            callback(argument)
        except Exception:
            _LOG.exception("worker=%s callback for %s went wrong", self.worker, argument)

    async def _spawn(self, epoch: int) -> None:
        async with self._at_work:
            if not self._is_starting(epoch):
                return
            self._log.last.clear()
            self._established = set()
            try:
                command = await self._prepare(epoch)
                await _require_free(command.url)
                if not self._is_starting(epoch):
                    return
                self._popen = popen = _start(command)
                self._watch = TreeWatch(read_child(popen.pid), lambda death: self._process_died(epoch, death))
                self._watch.start()
                self._lifeline = self._watch_lifeline(epoch, command.lifeline)
            except (OSError, ValueError, subprocess.SubprocessError, MidstreamError) as error:
                # Also what was started but cannot be watched, as without descriptors: the end of the tree follows.
                self._happened(Died(epoch, f"it could not be started: {error}"))
                return
            self._epoch_tasks = [
                asyncio.create_task(self._forward(popen), name=f"output of {self.worker}/{epoch}"),
                asyncio.create_task(self._until_healthy(epoch, command.url), name=f"health of {self.worker}/{epoch}"),
            ]

    def _is_starting(self, epoch: int) -> bool:
        return self._life.epoch == epoch and self._life.state is WorkerState.STARTING

    async def _forward(self, popen: "subprocess.Popen[bytes]") -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), popen.stdout)
        try:
            await self._log.forward(reader)
        finally:
            transport.close()

    def _watch_lifeline(self, epoch: int, path: Path | None) -> Watched | None:
        self._ending_pid = None
        if self._lifelines is None or path is None:
            return None
        try:
            return self._lifelines.add(path, lambda holder: self._lifeline_broke(epoch, holder))
        except LifelineError as error:
            _LOG.warning("worker=%s epoch=%d %s", self.worker, epoch, error)
            return None

    def _lifeline_broke(self, epoch: int, holder: Holder) -> None:
        """A process of the engine is being taken down: its sessions need not wait until nothing of it is left."""
        if self._is_starting(epoch):
            return  # nobody's session waits, and what the engine has to say of it comes with the end of its root
        self._ending_pid = holder.pid
        if self._life.epoch == epoch and self._life.state in (WorkerState.READY, WorkerState.DRAINING):
            self._end_the_others()
        self._happened(Died(epoch, f"{holder.text}: the kernel is taking it down"))
        _LOG.info("event=death worker=%s epoch=%d by=lifeline pid=%d", self.worker, epoch, holder.pid)

    def _end_the_others(self) -> None:
        """Before anybody hears of a death: a core that lives on gives away the blocks of requests that are closed."""
        if not self._life.is_wanted:
            return  # it was told to end, and does
        for process in self.processes()[1:]:  # the root has no blocks, and knows how its children ended
            try:
                if not tidies_up(process):
                    send(process, signal.SIGKILL)
            except OSError as error:
                _LOG.warning("worker=%s pid=%d cannot be ended yet (%s)", self.worker, process.pid, error)

    def _process_died(self, epoch: int, death: Death) -> None:
        if death.process.pid == self._ending_pid:
            _LOG.info("event=gone worker=%s epoch=%d %s", self.worker, epoch, death.text)
        if not death.is_root:
            if self._matters(death):
                self._happened(Died(epoch, death.text))
        elif self._is_starting(epoch):
            # Nobody's session waits for this news, and what the engine said last is the most useful part of it.
            self._spawn_task(
                self._tell_early_end(epoch, say_status(death.status)), f"last lines of {self.worker}/{epoch}"
            )
        else:
            self._happened(Died(epoch, f"main {death.text}"))

    async def _tell_early_end(self, epoch: int, how: str) -> None:
        if output := self._epoch_tasks[:1]:
            await asyncio.wait(output, timeout=_LAST_LINES_S)
        self._happened(Died(epoch, f"it ended before it was ready ({how}){self._log.last_text()}"))

    def _matters(self, death: Death) -> bool:
        """Whether the engine is no engine any more without this process.

        Engines call compilers and other helpers, which come and go; what was there when the engine became ready, or has
        been there for long, is part of it. One that ended in good order is left to the engine to judge.
        """
        return death.status != 0 and any(death.process.is_same(process) for process in self._established)

    async def _until_healthy(self, epoch: int, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while True:
                if await _is_healthy(client, url):
                    break
                await asyncio.sleep(_HEALTH_PAUSE_S)
        assert self._watch is not None
        self._watch.scan()
        before = self._established = set(self._watch.living())
        self._happened(BecameHealthy(epoch))
        while True:
            await asyncio.sleep(_ESTABLISHED_S)
            now = set(self._watch.living())
            self._established = (self._established | before) & now
            before = now

    async def _kill(self, epoch: int, grace_s: float) -> None:
        async with self._at_work:
            if self._lifeline is not None:
                self._lifeline.close()
                self._lifeline = None
            if self._watch is not None:
                if left := await self._kill_tree(self._watch, grace_s):
                    _LOG.error(
                        "worker=%s epoch=%d processes %s cannot be killed (stuck in a driver?); going on without them",
                        self.worker,
                        epoch,
                        [process.pid for process in left],
                    )
                self._watch.close()
            await self._end_tasks()
            if self._popen is not None:
                self._popen.poll()  # collects it
                if self._popen.stdout is not None:
                    self._popen.stdout.close()
            self._watch = self._popen = None
        self._happened(Gone(epoch))

    async def _kill_tree(self, watch: TreeWatch, grace_s: float) -> list[Process]:
        for _ in range(_KILL_TRIES):
            try:
                return await watch.kill(grace_s)
            except OSError as error:  # out of descriptors: those of the engine's streams are about to be closed
                _LOG.warning("worker=%s its processes cannot be ended now (%s); trying again", self.worker, error)
                await asyncio.sleep(_KILL_PAUSE_S)
        return watch.living()

    async def _end_tasks(self) -> None:
        tasks, self._epoch_tasks = self._epoch_tasks, []
        if tasks:  # the first forwards the output, which ends by itself now that nobody can write any more
            await asyncio.wait(tasks[:1], timeout=_LAST_LINES_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn_task(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("worker=%s %s went wrong", self.worker, task.get_name(), exc_info=error)


def _start(command: Command) -> "subprocess.Popen[bytes]":
    # Not asyncio's own: its child watcher would collect the process before anybody could see how it ended.
    return subprocess.Popen(
        command.argv,
        env=dict(command.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=dies_with_parent(signal.SIGTERM),
    )


async def _require_free(url: str) -> None:
    """EngineError when somebody listens at `url` already: its health would be taken for the engine's."""
    parts = urlsplit(url)
    with suppress(OSError, TimeoutError):
        connecting = asyncio.open_connection(parts.hostname, parts.port)
        _, writer = await asyncio.wait_for(connecting, _CONNECT_TIMEOUT_S)
        writer.close()
        raise EngineError(f"something else listens at {url} already; stop it, or choose another port")


async def _is_healthy(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
