"""Facts about processes and trees of them, and signals that never reach a stranger.

Invariant: a process is its pid *and* its start time, so a pid that the kernel gave to somebody else is never taken for
the one that was meant; signals go through a pidfd that was checked after it was opened. Linux only: reads `/proc`.
Does not wait for anything: watching is `process_watch.py`, starting is `supervise.py`.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
# How Python starts the process that removes the shared memory of those that did not come to it.
_TRACKER = b"multiprocessing.resource_tracker"
# Found before any fork: between fork and exec a child must not load or allocate more than it has to.
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One process: `started` is in clock ticks since boot, as the kernel counts it."""

    pid: int
    started: int
    name: str
    parent: int
    session: int

    def is_same(self, other: "Process | None") -> bool:
        """Whether both are one process; names and parents change in its life, pid and start do not."""
        return other is not None and (self.pid, self.started) == (other.pid, other.started)


def read_process(pid: int) -> Process | None:
    """The process that has `pid` now; None when there is none or it is dead already."""
    found = _read_stat(pid)
    return None if found is None or found[1] in "ZX" else found[0]


def read_child(pid: int) -> Process:
    """A child of this process that was not collected yet, dead or alive: its pid cannot be another's."""
    found = _read_stat(pid)
    if found is None:
        raise ProcessLookupError(f"process {pid} is no child of this one, or was collected already")
    return found[0]


def remains(process: Process) -> tuple[Process, int | None]:
    """A dead process under its last name, and how it ended, as `waitpid` counts.

    None when that can no longer be known because its parent has collected it. Engines name their processes only after
    they have started, so the last name says more than the first.
    """
    found = _read_stat(process.pid)
    if found is None or found[1] != "Z" or not process.is_same(found[0]):
        return process, None
    return found[0], found[2]


def say_status(status: int | None) -> str:
    """An exit status in words: `killed by SIGKILL`, `exit code 3`."""
    if status is None:
        return "how it ended is not known"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
        return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def tidies_up(process: Process) -> bool:
    """Whether it does nothing but remove from shared memory what the others leave there, once they have ended.

    It ends by itself then. Whoever ends it with them leaves their segments behind: those of an engine of several ranks
    are hundreds of megabytes for each of its deaths.
    """
    try:
        return _TRACKER in (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return False


def all_pids() -> set[int]:
    """The pids of all processes that this one may see."""
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()}


def open_pidfd(process: Process) -> int | None:
    """A descriptor of exactly this process, readable as soon as it is dead; None when it is gone already."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pid may have changed hands before the open; from here on it cannot.
    if process.is_same(found[0] if (found := _read_stat(process.pid)) else None):
        return descriptor
    os.close(descriptor)
    return None


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False when it is gone."""
    descriptor = open_pidfd(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def collect(processes: Iterable[Process]) -> list[Process]:
    """Collect the dead that became children of this process when their parents died.

    Returns those that lie uncollected still, under a parent that has yet to do it or to die.
    """
    left: list[Process] = []
    for process in processes:
        found = _read_stat(process.pid)
        if found is None or found[1] != "Z" or not process.is_same(found[0]):
            continue
        if found[0].parent != os.getpid():
            left.append(process)
            continue
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return left


def dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    """What a child runs between fork and exec so that it gets `number` when this process (its thread) is gone.

    The kernel forgets it for the child's own children: an engine's front end ends those itself when it is terminated.
    """
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above: no signal would ever come
            os._exit(1)

    return between_fork_and_exec


def can_die_with_parent() -> bool:
    """Whether this kernel has PR_SET_PDEATHSIG; asks without changing anything."""
    value = ctypes.c_int()
    return bool(_LIBC.prctl(2, ctypes.byref(value), 0, 0, 0) == 0)  # PR_GET_PDEATHSIG


def _read_stat(pid: int) -> tuple[Process, str, int] | None:
    """The process, its state letter and its exit code."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    process = Process(pid, int(fields[19]), name, int(fields[1]), int(fields[3]))
    return process, fields[0], int(fields[49])
