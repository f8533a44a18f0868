"""Parks processes that are known by their pids, and brings back what has a record: the commands, without a sidecar.

Owns the order: the group's lock, then what an earlier keeper left, then what was asked for. A group of a sidecar's
worker is that sidecar's, and not touched here.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...adapters.cuda_checkpoint.helper import CUDA
from ...adapters.cuda_checkpoint.machine import RESTING, Limits, ParkState
from ...session.errors import ParkError
from ..processes import read_process
from .guests import BareProcess
from .journal import Entry, Journal
from .keeper import Keeper, Outcome

# How long a group that others work on is waited for: a call of theirs may be under way.
PATIENCE_S = 10.0
# The name of a process's own record; everything else is a worker's.
PREFIX = "pid-"


@dataclass(frozen=True, slots=True)
class Options:
    """What the commands have in common. `free_bytes`: host memory, where the machine says less than there is."""

    state_dir: Path
    limits: Limits
    probe: str | None = None
    driver: str = CUDA
    free_bytes: int | None = None


def name_of(pids: Sequence[int]) -> str:
    """The name of the record of these processes."""
    return f"{PREFIX}{pids[0]}"


async def park(pids: Sequence[int], options: Options) -> Outcome:
    """Park these processes together. ParkError where that cannot even be tried."""
    processes = []
    for pid in pids:
        process = read_process(pid)
        if process is None:
            raise ParkError(f"gone: there is no process {pid}; it has ended, or the pid is wrong")
        processes.append(process)
    journal, guest = Journal(options.state_dir), BareProcess(options.probe)
    async with _Locked(journal, name_of(pids)) as lock_fd:
        left = journal.read(name_of(pids))
        if left is not None and [(r.pid, r.started) for r in left.ranks] == [(p.pid, p.started) for p in processes]:
            keeper = Keeper.of(left, guest, journal, lock_fd, **_common(options))
            async with _Kept(keeper):
                found = await keeper.adopt()
                if found.state is not ParkState.RUNNING:
                    return found
        keeper = Keeper(name_of(pids), processes, guest, journal, lock_fd, **_common(options))
        async with _Kept(keeper):
            return await keeper.park()


async def unpark(name: str, moves: Sequence[str], options: Options) -> Outcome:
    """Bring back what has that record, or find out what became of it. ParkError where there is none."""
    journal = Journal(options.state_dir)
    if journal.read(name) is None:
        raise ParkError(f"{name}: nothing of that name is parked; `midstream park` lists what is")
    async with _Locked(journal, name) as lock_fd:
        entry = journal.read(name)
        if entry is None:
            raise ParkError(f"{name}: it is not parked any more; somebody else has brought it back, or it was lost")
        keeper = Keeper.of(entry, BareProcess(options.probe), journal, lock_fd, **_common(options))
        async with _Kept(keeper):
            # Also where the record says parked: only the driver knows whether that still holds.
            found = await keeper.adopt()
            if found.state is not ParkState.PARKED:
                return found
            return await keeper.unpark(moves_of(moves, keeper.entry))


def moves_of(words: Sequence[str], entry: Entry) -> dict[str, str]:
    """Which GPU becomes which, from `NEW` (of a group on one GPU) or `OLD=NEW`. ParkError."""
    had = sorted({uuid for rank in entry.ranks for uuid in rank.gpus})
    found: dict[str, str] = {}
    for word in words:
        old, separator, new = word.partition("=")
        if not separator:
            if len(had) != 1 or len(words) != 1:
                raise ParkError(f"{entry.name} was on {', '.join(had) or 'no known GPU'}; say which: --gpu OLD=NEW")
            old, new = had[0], word
        if old not in had:
            raise ParkError(f"{entry.name} was not on {old}, but on {', '.join(had) or 'no known GPU'}")
        found[old] = new
    return found


def listed(state_dir: Path) -> list[Mapping[str, object]]:
    """What has a record, for people and programs."""
    rows: list[Mapping[str, object]] = []
    for entry in Journal(state_dir).entries():
        gpus = {uuid: size for rank in entry.ranks for uuid, size in rank.gpus.items()}
        rows.append(
            {
                "name": entry.name,
                # Whoever was at work there is gone, or will be through with it soon.
                "state": entry.state.value if entry.state in RESTING else f"{entry.state.value}...",
                "pids": [rank.pid for rank in entry.ranks],
                "gpus": {uuid: f"{size / (1 << 30):.2f} GiB" for uuid, size in gpus.items()},
                "for_s": round(max(time.time() - entry.since, 0.0), 1),
                "text": entry.text,
            }
        )
    return rows


def _common(options: Options) -> dict[str, Any]:
    return {"limits": options.limits, "driver": options.driver, "free_bytes": options.free_bytes}


class _Locked:
    """The lock of a group while this lasts."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = name
        self._fd = -1

    async def __aenter__(self) -> int:
        self._fd = await self._journal.lock(self._name, PATIENCE_S)
        return self._fd

    async def __aexit__(self, *_: object) -> None:
        os.close(self._fd)
        self._journal.tidy()


class _Kept:
    """A keeper while this lasts; Ctrl-C and SIGTERM ask it to come to rest instead of leaving a process locked."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self._keeper.cancel)

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)
        await self._keeper.close()
