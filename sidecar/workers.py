"""What the sidecar knows of its workers: epochs with their arenas, who is ready, who runs in whose pool.

Owns the arenas' lifetime: an epoch's arena (and its pool in the holder) is kept until no session needs it and a later
epoch is ready, then both are let go at once. Starts and watches nothing; supervise and attach tell it what happened.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..adapters.alive import nothing_left
from ..adapters.contract import EngineAdapter
from ..adapters.registry import adapter_named
from ..session.arena import ArenaReader
from ..session.errors import ArenaError, EngineError, MidstreamError
from ..session.ids import SessionId
from ..session.key import CompatibilityKey
from ..session.lifeline import lifeline_of
from .choice import Candidate
from .supervise import WorkerState

_LOG = logging.getLogger("midstream.workers")

SESSIONS_MAX_UNKNOWN = 1_000_000
# More than that an engine cannot mean.
FRONT_ENDS_MAX = 256
SETTLED = (WorkerState.READY, WorkerState.DRAINING, WorkerState.FAILED, WorkerState.STOPPED)


@dataclass(slots=True)
class Epoch:
    """One start of a worker."""

    worker: str
    number: int
    arena_path: Path | None
    adopt: "Epoch | None" = None
    arena: ArenaReader | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    key: CompatibilityKey | None = None
    adapter: EngineAdapter | None = None
    sessions: set[SessionId] = field(default_factory=set)
    # It writes no more that counts; its processes may still be on their way out (`adapters/alive.py` tells).
    dead: bool = False
    # A later engine runs in its memory without having kept its sessions' blocks.
    overwritten: bool = False

    @property
    def pools(self) -> list[str]:
        """Names of its pools in the holder, one a rank."""
        return [str(name) for name in self.facts.get("pools") or []]

    @property
    def front_ends(self) -> int:
        """How many processes read its requests."""
        count = self.facts.get("front_ends")
        return count if type(count) is int and 0 < count <= FRONT_ENDS_MAX else 1

    @property
    def id(self) -> tuple[str, int]:
        return self.worker, self.number

    @property
    def exact_obstacles(self) -> list[str]:
        """Why no session of this engine could go on exactly, as its plugin says; [] when they can."""
        self.learn()
        if words := [str(word) for word in self.facts.get("inexact") or []]:
            return words
        if self.key is None or not self.pools:
            return ["no_plugin" if not self.facts else "no_pool"]
        return []

    @property
    def sampling_obstacles(self) -> list[str]:
        """Why sessions of this engine that draw their tokens at random could not, although others can."""
        self.learn()
        return [str(word) for word in self.facts.get("inexact_sampled") or []]

    def learn(self) -> bool:
        """Read what the engine published; True once it is known."""
        if self.facts or self.arena_path is None:
            return bool(self.facts)
        try:
            self.arena = self.arena or ArenaReader(self.arena_path)
            facts = self.arena.facts()
            if facts is None:
                return False
            self.facts = facts
            self.adapter = self.adapter or adapter_named(str(facts.get("engine")))
            self.key = self.adapter.key(facts)
        except (ArenaError, EngineError) as error:
            _LOG.warning("event=facts worker=%s epoch=%d error=%s", self.worker, self.number, error)
            return bool(self.facts)
        return True


@dataclass(slots=True)
class Worker:
    """A worker and its epochs: the current one, and older ones that sessions may still need."""

    name: str
    url: str
    state: WorkerState = WorkerState.STOPPED
    text: str = ""
    pid: int | None = None
    current: Epoch | None = None
    older: list[Epoch] = field(default_factory=list)
    restart_count: int = 0
    # It is being emptied: it goes on with what it has, and takes nothing.
    leaving: bool = False
    # It is in memory of the host, or on its way; it may be brought back (docs/parking.md).
    parked: bool = False

    @property
    def session_count(self) -> int:
        """Sessions that its current epoch has."""
        return len(self.current.sessions) if self.current is not None else 0


class Workers:
    """All workers of this sidecar."""

    def __init__(self, *, let_go: Callable[[Epoch], None]) -> None:
        self._workers: dict[str, Worker] = {}
        self._let_go = let_go

    def add(self, name: str, url: str) -> Worker:
        """A worker that was configured."""
        self._workers[name] = worker = Worker(name, url)
        return worker

    def get(self, name: str) -> Worker:
        """A worker by name."""
        return self._workers[name]

    def all(self) -> list[Worker]:
        """In the order of their configuration."""
        return list(self._workers.values())

    def begin_epoch(self, worker: Worker, number: int, arena_path: Path | None) -> Epoch:
        """A new start; the epoch before is kept for its sessions, and offered for adoption."""
        before = worker.current
        if before is not None:
            before.dead = True
            worker.older.append(before)
            worker.restart_count += 1
        worker.current = Epoch(worker.name, number, arena_path, adopt=_adoptable(worker))
        self.sweep(worker)
        return worker.current

    def became(self, worker: Worker, state: WorkerState, text: str = "", pid: int | None = None) -> None:
        """A worker's new state."""
        worker.state, worker.text, worker.pid = state, text, pid
        if worker.current is not None:
            if state is WorkerState.READY:
                worker.current.learn()
                if worker.current.facts.get("adopted") and worker.current.adopt is None:
                    for epoch in worker.older:
                        epoch.overwritten = True
                self.sweep(worker)
            elif state in (WorkerState.DEAD, WorkerState.FAILED, WorkerState.STOPPED):
                worker.current.learn()
                worker.current.dead = True
                # A worker that stays away has no next start to sweep after it.
                self.sweep(worker)

    def ready(self) -> list[Worker]:
        """Workers that can take sessions."""
        ready = (w for w in self._workers.values() if w.state is WorkerState.READY and w.current is not None)
        return [w for w in ready if not w.leaving]

    def coming(self) -> bool:
        """Whether a worker that is not ready may become so."""
        hopeful = (WorkerState.STARTING, WorkerState.RESTARTING, WorkerState.DEAD, WorkerState.UNREACHABLE)
        return any(w.parked or (w.state in hopeful and not w.leaving) for w in self._workers.values())

    def candidates(self) -> list[Candidate]:
        """The ready workers, as the choice sees them."""
        return [_candidate(w.current) for w in self.ready() if w.current is not None and (w.current.learn() or True)]

    def assign(self, session: SessionId, epoch: Epoch) -> None:
        """A session runs on, or still needs, an epoch."""
        epoch.sessions.add(session)

    def unassign(self, session: SessionId, epoch: Epoch) -> None:
        """A session needs an epoch no more."""
        epoch.sessions.discard(session)
        if epoch.dead:
            self.sweep(self._workers[epoch.worker])

    def sweep(self, worker: Worker) -> None:
        """Let go of epochs that nobody needs: a dead pool costs the memory that the next one lacks."""
        current = worker.current
        for epoch in list(worker.older):
            # An engine that is still starting may be adopting from this arena.
            adopting = current is not None and current.adopt is epoch and worker.state not in SETTLED
            if not epoch.sessions and not adopting:
                worker.older.remove(epoch)
                self._release(epoch)
        over = worker.state in (WorkerState.FAILED, WorkerState.STOPPED)
        if current is not None and current.dead and over and not current.sessions:
            self._release(current)
            worker.current = None

    def _release(self, epoch: Epoch) -> None:
        epoch.adopt = None
        try:
            self._let_go(epoch)
        except MidstreamError as error:
            _LOG.warning("event=let_go worker=%s epoch=%d error=%s", epoch.worker, epoch.number, error)
        if epoch.arena is not None:
            epoch.arena.close()
            epoch.arena = None
        if epoch.arena_path is not None:
            epoch.arena_path.unlink(missing_ok=True)
            lifeline_of(epoch.arena_path).unlink(missing_ok=True)


def past_use(epochs: Iterable[Epoch]) -> list[Epoch]:
    """Dead epochs of which no process is left: where their sessions have ended with the sidecar, nobody needs them."""
    return [epoch for epoch in epochs if epoch.dead and epoch.facts and nothing_left(epoch.facts)]


def _adoptable(worker: Worker) -> Epoch | None:
    """The epoch whose pool the next start may run in.

    An engine keeps the blocks of one arena's sessions. Where that pool is the memory of the epoch before it, sessions
    that have not left that one would be written over: then the next engine gets a pool of its own, and theirs is
    copied. So it does where an engine ran in such memory without having sessions to keep there: nobody could ask for
    the end of its processes.
    """
    newest = next((e for e in reversed(worker.older) if e.pools or e.facts.get("adopted")), None)
    if newest is None or not newest.pools:
        return None
    if newest.facts.get("adopted") and newest.adopt is not None and newest.adopt.sessions:
        return None
    return newest


def _candidate(epoch: Epoch) -> Candidate:
    adopted = epoch.adopt.id if epoch.adopt is not None and epoch.facts.get("adopted") else None
    key = epoch.key
    if key is not None and not epoch.pools:
        # There is nowhere to bring KV to, so its layout is equal to no other; who may continue a text needs the rest.
        key = CompatibilityKey({**key.fields, "kv_layout": f"no pool of {epoch.worker}/{epoch.number}"})
    return Candidate(
        epoch.worker,
        epoch.number,
        key,
        len(epoch.sessions),
        int(epoch.facts.get("max_sessions") or SESSIONS_MAX_UNKNOWN),
        adopted,
    )
