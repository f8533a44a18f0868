"""Ends what is left of an engine that others started, once the process that served its clients is gone.

Such a core serves nobody, and yet goes on decoding and writing into its pool, which keeps the next start from running
there. Owns what is known of one worker's engines. Invariants: only processes that the engine named itself, under the
same pid and start time, are ended, and only when its front end is gone; an engine of another pid namespace is let be.
"""

import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any

from ..adapters.alive import EngineProcess, can_be_seen, front_end, parts
from ..session.errors import PoolError
from .processes import read_process, send

_LOG = logging.getLogger("midstream.orphans")

# Engines of one worker of which something is left: mostly none, or the last one for as long as it takes to die. Of more
# than these, processes that even SIGKILL does not end, the oldest are given up.
ENGINES_MAX = 16


class Orphans:
    """The engines of one worker, as long as anything is left of them."""

    def __init__(self, worker: str, on_ended: Callable[[str], None]) -> None:
        self._worker = worker
        self._on_ended = on_ended
        self._engines: dict[int, tuple[EngineProcess | None, tuple[EngineProcess, ...]]] = {}
        # Told and counted once, however long the kernel needs to take one down.
        self._told: set[EngineProcess] = set()

    def know(self, epoch: int, facts: Mapping[str, Any]) -> None:
        """An engine has published its facts."""
        if epoch in self._engines or not can_be_seen(facts):
            return
        try:
            self._engines[epoch] = front_end(facts), parts(facts)
        except PoolError as error:
            _LOG.warning("event=facts worker=%s epoch=%d error=%s", self._worker, epoch, error)
        while len(self._engines) > ENGINES_MAX:
            self._engines.pop(min(self._engines))

    def anything_left_before(self, epoch: int) -> bool:
        """Whether a process of an earlier engine still runs."""
        return any(number < epoch and _left(members) for number, (_, members) in self._engines.items())

    def end(self) -> None:
        """SIGKILL to each process whose engine has no front end any more."""
        for number, (served, members) in list(self._engines.items()):
            left = _left(members)
            if not left:
                del self._engines[number]
                self._told.difference_update(members)
            elif served is not None and served.is_gone():
                for member in left:
                    self._end(number, member)

    def _end(self, epoch: int, member: EngineProcess) -> None:
        process = read_process(member.pid)
        if process is None or process.started != member.started:
            return
        try:
            sent = send(process, signal.SIGKILL)
        except OSError as error:
            if member not in self._told:
                _LOG.error("event=orphan worker=%s epoch=%d pid=%d error=%s", self._worker, epoch, member.pid, error)
            self._told.add(member)
            return
        if sent and member not in self._told:
            self._told.add(member)
            _LOG.warning(
                "event=orphan worker=%s epoch=%d pid=%d process=%s action=killed reason=its front end is gone",
                self._worker, epoch, member.pid, process.name,
            )  # fmt: skip
            self._on_ended(self._worker)


def _left(members: tuple[EngineProcess, ...]) -> list[EngineProcess]:
    return [member for member in members if not member.is_gone()]
