"""What is written down of each group that is parked, or on its way: so that whoever comes after its keeper can go on.

Owns `parked/` in the state folder (docs/parking.md). Invariants: a record is whole, or it is not there; a group has one
keeper at a time, who holds the lock of its record, and so do the helpers that it started: what they have under way is
over before another is given the lock. It judges nothing.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...adapters.cuda_checkpoint.machine import ParkState
from ...session.errors import ParkError
from ..processes import read_process

FOLDER = "parked"
VERSION = 1
RECORD_BYTES_MAX = 256 * 1024
RANKS_MAX = 64
LOOK_EVERY_S = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ParkedRank:
    """A process of the group, and what it had on which GPU when it was last looked at."""

    pid: int
    started: int
    gpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of a group. `pairs`: the map of its last restore; `probe`: what its guest wants to know again."""

    name: str
    state: ParkState
    ranks: tuple[ParkedRank, ...]
    since: float
    pairs: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    refused: int = 0
    text: str = ""

    def to_json(self) -> bytes:
        """As its file has it."""
        ranks = [{"pid": r.pid, "started": r.started, "gpus": dict(r.gpus)} for r in self.ranks]
        body = {
            "v": VERSION, "name": self.name, "state": self.state.value, "ranks": ranks, "since": self.since,
            "map": dict(self.pairs), "probe": dict(self.probe), "refused": self.refused, "text": self.text,
        }  # fmt: skip
        return json.dumps(body, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, raw: bytes) -> "Entry":
        """The record in a file. ParkError when it is none."""
        try:
            body = json.loads(raw)
            if body["v"] != VERSION:
                raise ParkError(f"version {body['v']!r} is not known here; use the midstream that wrote it")
            ranks = tuple(
                ParkedRank(int(r["pid"]), int(r["started"]), {str(u): int(n) for u, n in r["gpus"].items()})
                for r in body["ranks"]
            )
            if not 0 < len(ranks) <= RANKS_MAX:
                raise ParkError(f"it has {len(ranks)} processes")
            return cls(
                checked_name(str(body["name"])),
                ParkState(body["state"]),
                ranks,
                float(body["since"]),
                {str(old): str(new) for old, new in body["map"].items()},
                dict(body["probe"]),
                int(body["refused"]),
                str(body["text"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ParkError(f"no record of a parked process ({type(error).__name__}: {error})") from error


class Journal:
    """All records of a state folder."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / FOLDER

    def names(self) -> list[str]:
        """What there are records of."""
        with contextlib.suppress(OSError):
            return sorted(path.stem for path in self.folder.glob("*.json") if _NAME.fullmatch(path.stem))
        return []

    def read(self, name: str) -> Entry | None:
        """A record; None where there is none. ParkError where it cannot be read."""
        path = self._path(name, "json")
        try:
            with path.open("rb") as source:
                raw = source.read(RECORD_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ParkError(f"{path}: {error.strerror}; mend its mode") from error
        try:
            return Entry.from_json(raw)
        except ParkError as error:
            raise ParkError(
                f"{path}: {error}; see with `cuda-checkpoint --get-state` what became of it, and remove the file"
            ) from error

    def write(self, entry: Entry) -> None:
        """Put a record in place of the one before. ParkError where it cannot be written."""
        path = self._path(entry.name, "json")
        new = path.with_suffix(".new")
        try:
            self._make()
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as sink:
                sink.write(entry.to_json())
            new.replace(path)
        except OSError as error:
            raise ParkError(f"{path}: {error.strerror}; without a record nothing is parked, give it room") from error

    def forget(self, name: str) -> None:
        """Remove a record; its lock's file stays until the folder goes, for somebody may wait for it."""
        self._path(name, "json").unlink(missing_ok=True)

    async def lock(self, name: str, within_s: float) -> int:
        """The descriptor of a group's lock, held; close it to let go. ParkError when others hold it for so long."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while (fd := self._try_lock(name)) is None:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise ParkError(f"{name}: somebody else works on it; wait until that is over, see `midstream park`")
            await asyncio.sleep(LOOK_EVERY_S)
        return fd

    def tidy(self) -> None:
        """Remove what is of no use to anybody: records of processes that have ended, locks of nothing, the folder."""
        with contextlib.suppress(OSError, ParkError):
            for path in self.folder.glob("*.lock"):
                fd = self._try_lock(path.stem)
                if fd is None:
                    continue
                with contextlib.suppress(ParkError):
                    entry = self.read(path.stem)
                    if entry is None or not any(_lives(rank) for rank in entry.ranks):
                        self.forget(path.stem)
                        # Whoever waits for it sees that it is not that file any more.
                        path.unlink(missing_ok=True)
                os.close(fd)
            self.folder.rmdir()

    def _try_lock(self, name: str) -> int | None:
        """The lock, if nobody has it."""
        self._make()
        path = self._path(name, "lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
        return None

    def entries(self) -> Iterator[Entry]:
        """All records that can be read."""
        for name in self.names():
            with contextlib.suppress(ParkError):
                entry = self.read(name)
                if entry is not None:
                    yield entry

    def _make(self) -> None:
        try:
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ParkError(f"{self.folder}: {error.strerror}; choose another with --state-dir") from error

    def _path(self, name: str, kind: str) -> Path:
        return self.folder / f"{checked_name(name)}.{kind}"


def checked_name(name: str) -> str:
    """A name that can be a file's. ParkError for any other."""
    if not _NAME.fullmatch(name):
        raise ParkError(f"{name!r:.80} is no name of a parked process; `midstream park` lists them")
    return name


def _lives(rank: ParkedRank) -> bool:
    found = read_process(rank.pid)
    return found is not None and found.started == rank.started
