"""What there is to know of a process and of this machine before a park, from /proc and the cgroup.

It judges nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...adapters.cuda_checkpoint.driver import About, Gpu, ProcessState
from ...adapters.cuda_checkpoint.preflight import NCCL_OFF, Host, Rank

_ENVIRON_BYTES_MAX = 4 << 20


def host_of(look: Mapping[str, Any], *, free_bytes: int | None = None) -> Host:
    """The machine, as a helper's `look` tells of its cards."""
    gpus = tuple(Gpu(**{**gpu, "served": frozenset(gpu["served"])}) for gpu in look["gpus"])
    about = About(tuple(look["driver"]), tuple(look["missing"]))
    return Host(os.getuid(), about, gpus, free_host_bytes() if free_bytes is None else free_bytes)


def rank_of(pid: int, look: Mapping[str, Any]) -> Rank:
    """A process, as a helper's `look` tells of it."""
    state = None if look["state"] is None else ProcessState(look["state"])
    return Rank(pid, uid_of(pid), state, dict(look["held"]), environ_of(pid))


def uid_of(pid: int) -> int | None:
    """Whose a process is; None where there is none."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def environ_of(pid: int) -> dict[str, str]:
    """Of what a process was started with, that which NCCL goes by."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as source:
            raw = source.read(_ENVIRON_BYTES_MAX)
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0"))
    return {name: value for name, _, value in pairs if name in NCCL_OFF}


def free_host_bytes() -> int:
    """Host memory that may still be taken: the machine's, or what is left to this cgroup, if that is less."""
    free = [_available()]
    cgroup = _cgroup()
    if cgroup is not None:
        limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
        if limit is not None and used is not None:
            free.append(max(limit - used, 0))
    return min(free)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup() -> Path | None:
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/")
    except OSError:
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
