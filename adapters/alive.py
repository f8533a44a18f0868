"""Which processes an engine consists of, and whether any of them is left.

Owns what an engine's facts say of its processes: `processes` (all that can write to its pools or its arena) and
`front_end` (the one that serves clients), each as [pid, start time], and `pid_namespace`, in which those numbers mean
something. Invariant: a process is its pid *and* its start time, so a pid that the kernel gave to somebody else is
nobody's; and whoever cannot be shown to be gone counts as there. Standard library only: engines import it. Ends nobody.
"""

import contextlib
import multiprocessing
import os
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..session.errors import PoolError

# An engine takes its time to start anyway; one that is being ended is gone long before this.
GONE_WITHIN_S = 10.0
PROCESSES_MAX = 1024
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One process; `started` is in clock ticks since boot, None where an older plugin has not told it."""

    pid: int
    started: int | None

    def is_gone(self, within_s: float = 0.0) -> bool:
        """Whether nothing of it runs any more, with all its threads; waits for that so long."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # without descriptors nobody can tell
        try:
            started = _started(self.pid)
            if started is None or (self.started is not None and started != self.started):
                return True
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            # Readable once its last thread has ended: a zombie's memory is not mapped any more.
            return len(waiting.poll(max(within_s, 0.0) * 1000)) > 0
        finally:
            os.close(descriptor)


def told_processes(others: Iterable[int] = ()) -> dict[str, Any]:
    """The facts of the engine whose core is this process; `others` are those that have its pools mapped besides.

    Its front end is the process that has started this one as a part of itself, or this one.
    """
    parent = multiprocessing.parent_process()
    return {
        "processes": [_told(pid) for pid in dict.fromkeys((os.getpid(), *others))],
        "front_end": _told(os.getpid() if parent is None or parent.pid is None else parent.pid),
        "pid_namespace": _namespace(),
    }


def parts(facts: Mapping[str, Any]) -> tuple[EngineProcess, ...]:
    """The processes that can write to an engine's pools or arena. PoolError when its facts do not tell."""
    told = facts.get("processes")
    if told is None and isinstance(facts.get("pid"), int):
        return (EngineProcess(facts["pid"], None),)
    if not isinstance(told, list) or not 0 < len(told) <= PROCESSES_MAX:
        raise PoolError("its facts do not say which processes it has; run the same midstream in all engines")
    return tuple(_read(line) for line in told)


def front_end(facts: Mapping[str, Any]) -> EngineProcess | None:
    """The process that serves an engine's clients; None when its facts do not tell, or tell nonsense."""
    with contextlib.suppress(PoolError):
        return _read(facts["front_end"]) if "front_end" in facts else None
    return None


def can_be_seen(facts: Mapping[str, Any]) -> bool:
    """Whether an engine's pids mean the same here as there."""
    own = _namespace()
    return bool(facts.get("pid_namespace", own) == own)


def require_gone(facts: Mapping[str, Any], within_s: float | None = None) -> None:
    """Wait until nothing is left of the engine that published `facts`. PoolError when something is, or may be.

    What is left of it may go on decoding, and write into its pool.
    """
    if not can_be_seen(facts):
        raise PoolError("the engine that has it runs, or ran, where its processes cannot be seen from here")
    deadline_s = time.monotonic() + (GONE_WITHIN_S if within_s is None else within_s)
    for process in parts(facts):
        if not process.is_gone(deadline_s - time.monotonic()):
            raise PoolError(f"process {process.pid} of the engine that has it still runs; end it before a new start")


def nothing_left(facts: Mapping[str, Any]) -> bool:
    """Whether nothing is left of the engine that published `facts`; False where that cannot be known."""
    try:
        require_gone(facts, 0)
    except PoolError:
        return False
    return True


def _told(pid: int) -> list[int]:
    # One that has died by now is told as one that nobody can be.
    return [pid, _started(pid) or 0]


def _read(line: object) -> EngineProcess:
    if isinstance(line, list) and len(line) == 2 and all(type(number) is int for number in line) and line[0] > 0:
        return EngineProcess(*line)
    raise PoolError(f"its facts name a process as {line!r:.80}; run the same midstream in all engines")


def _started(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    return int(text[text.rindex(b")") + 2 :].split()[19])


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
