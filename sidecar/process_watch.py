"""Watches a tree of processes: tells as soon as any of them dies, and ends all of them.

Owns the pidfds. Invariant: a process that was seen once stays watched until it is dead, even when its parent dies first
and it no longer hangs on the tree; nothing of the tree is left after `kill`, not even as a zombie or a thread that is
still taking memory down. Which deaths matter is not decided here; that one has begun is told sooner by
`lifeline_watch.py`. Children that live shorter than one scan may never be seen.
"""

import asyncio
import logging
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat

from .processes import Process, all_pids, collect, open_pidfd, read_process, remains, say_status, send, tidies_up

# Engines start their processes in the first seconds; later ones are rare, and looking is not free.
_FIRST_SCANS_S = (0.02, 0.05, 0.1)
_SCAN_S = 0.25
_SETTLED_AFTER_SCANS = 240
_SETTLED_SCAN_S = 1.0
# What is left when the root has ended in good order was forgotten by it.
_FORGOTTEN_S = 0.5
_KILL_POLL_S = 0.01
_KILL_POLL_MAX_S = 0.1
# After SIGKILL the kernel needs a moment to take a process down, longer where gigabytes are to be freed.
_UNKILLABLE_S = 30.0
# Those who tidy up behind the others need as long as it takes to remove some files.
_TIDY_S = 1.0
WATCHED_MAX = 4096
_LOG = logging.getLogger("midstream.processes")


@dataclass(frozen=True, slots=True)
class Death:
    """One process of a tree is dead. `status` is as `waitpid` counts, None when it could not be known any more."""

    process: Process
    status: int | None
    is_root: bool

    @property
    def text(self) -> str:
        """Who died, and how."""
        return f"process {self.process.name} (pid {self.process.pid}): {say_status(self.status)}"


class TreeWatch:
    """Watches the tree of `root`; `on_death` is called in the event loop, once for each process that died."""

    def __init__(self, root: Process, on_death: Callable[[Death], None]) -> None:
        self._root = root
        self._on_death = on_death
        # By pid and start: while one's death waits to be told, its pid may already be another's.
        # Without a descriptor, when those have run out, a process is looked at in each scan.
        self._watched: dict[tuple[int, int], tuple[Process, int | None]] = {}
        # Pids that were looked at and are not of the tree: so that each scan reads only what is new.
        self._strangers: set[int] = set()
        # Dead, and perhaps to become children of this process once their parents are dead too.
        self._uncollected: list[Process] = []
        self._loop = asyncio.get_running_loop()
        self._scans: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a root that is dead already is told at once."""
        if not self._watch(self._root):
            self._loop.call_soon(self._on_death, Death(self._root, None, is_root=True))
            return
        self.scan()
        self._scans = self._loop.create_task(self._scan_on(), name=f"scan of {self._root.pid}")

    def scan(self) -> None:
        """Look for processes that are new since the last time, and collect the orphans among the dead."""
        self._uncollected = collect(self._uncollected)
        pids = all_pids()
        self._strangers &= pids
        watched = {pid for pid, _ in self._watched}
        unknown = [p for pid in pids - self._strangers - watched if (p := read_process(pid)) is not None]
        while found := [p for p in unknown if p.parent in watched or self._is_of_session(p)]:
            for process in found:
                self._watch(process)
                watched.add(process.pid)
            unknown = [p for p in unknown if p.pid not in watched]  # perhaps children of those just found
        self._strangers |= pids - watched
        for process, descriptor in list(self._watched.values()):
            is_watched = (process.pid, process.started) in self._watched  # a callback may have closed this watch
            if descriptor is None and is_watched and not process.is_same(read_process(process.pid)):
                self._died(process)

    def living(self) -> list[Process]:
        """The processes that are watched and not known to be dead."""
        return [process for process, _ in self._watched.values()]

    def close(self) -> None:
        """Stop watching; touches no process."""
        if self._scans is not None:
            self._scans.cancel()
        for process in self.living():
            self._forget(process)

    async def kill(self, grace_s: float) -> list[Process]:
        """End the whole tree: SIGTERM to its root, SIGKILL to all that is left after `grace_s` (0: at once).

        Deaths go on being told. Returns what could not be ended, which the caller must report; mostly nothing.
        """
        if grace_s > 0 and send(self._root, signal.SIGTERM):
            # The root knows how to end its own; a signal to each would be taken for a crash there.
            await self._until_dead([self._root], grace_s)
            if not self._is_there(self._root):
                await self._until_dead(self.living(), min(grace_s, _FORGOTTEN_S))
        deadline = self._loop.time() + _UNKILLABLE_S
        # How a process ended is known as long as its parent lives; but one that starts others again is not waited for.
        spared: Process | None = self._root
        while left := self._all_left():
            others = [p for p in left if not tidies_up(p)]
            if not others:
                await self._until_dead(left, _TIDY_S)
            ending = [p for p in others if not p.is_same(spared)] or others or left
            for process in ending:
                send(process, signal.SIGKILL)
            await self._until_dead(ending, min(1.0, max(deadline - self._loop.time(), 0)))
            if self._loop.time() >= deadline:
                return self._all_left()
            spared = None
        self.scan()
        for process in self.living():
            self._died(process)  # the loop has not come to it yet
        self._uncollected = collect(self._uncollected)
        return []

    def _all_left(self) -> list[Process]:
        """What lives of the tree: also what forked a moment ago, and what was left by parents that died."""
        self._strangers.clear()
        self.scan()
        return [p for p in self.living() if self._is_there(p)]

    def _is_there(self, process: Process) -> bool:
        """Whether anything of a process is left.

        `/proc` calls it dead when its first thread is, while another may still be giving its memory back.
        """
        _, descriptor = self._watched.get((process.pid, process.started), (process, None))
        if descriptor is None:
            return process.is_same(read_process(process.pid))
        looking = select.poll()
        looking.register(descriptor, select.POLLIN)
        return not looking.poll(0)

    def _is_of_session(self, process: Process) -> bool:
        """Whether a process belongs to the root's own kernel session, if it has one: orphans do still."""
        return self._root.session == self._root.pid == process.session

    async def _until_dead(self, processes: list[Process], within_s: float) -> None:
        deadline, pause_s = self._loop.time() + within_s, _KILL_POLL_S
        while any(self._is_there(p) for p in processes) and self._loop.time() < deadline:
            await asyncio.sleep(min(pause_s, max(deadline - self._loop.time(), 0)))
            pause_s = min(pause_s * 2, _KILL_POLL_MAX_S)

    def _watch(self, process: Process) -> bool:
        if (process.pid, process.started) in self._watched:
            return True
        if len(self._watched) >= WATCHED_MAX:
            return False
        try:
            descriptor = open_pidfd(process)
        except OSError as error:
            _LOG.warning("pid=%d is watched by looking at it (%s); raise the limit: ulimit -n", process.pid, error)
            self._watched[process.pid, process.started] = (process, None)
            return True
        if descriptor is None:
            return False
        self._watched[process.pid, process.started] = (process, descriptor)
        self._loop.add_reader(descriptor, self._died, process)
        return True

    def _died(self, process: Process) -> None:
        # Read before anybody collects it: afterwards nobody knows how it ended.
        named, status = remains(process)
        self._forget(process)
        if not process.is_same(self._root):  # the root is collected by whoever started it
            self._uncollected = collect([*self._uncollected, process])
        self._on_death(Death(named, status, is_root=process.is_same(self._root)))

    def _forget(self, process: Process) -> None:
        _, descriptor = self._watched.pop((process.pid, process.started))
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    async def _scan_on(self) -> None:
        settling = chain(_FIRST_SCANS_S, repeat(_SCAN_S, _SETTLED_AFTER_SCANS), repeat(_SETTLED_SCAN_S))
        for pause_s in settling:
            await asyncio.sleep(pause_s)
            try:
                self.scan()
            except OSError as error:  # out of descriptors: the next scan may find some
                _LOG.warning("pid=%d its tree cannot be looked at now (%s)", self._root.pid, error)
