"""Arenas whose KV a fault of a GPU may have touched: noted before the mover ends, known to every mover after it.

Sums die with the mover, just when the memory that they are of is suspect. Owns one small file beside the mover's socket
(docs/formats.md). Invariants: an arena that was noted is refused as a source of KV for as long as its file is there, by
this process and by those after it; a file that cannot be read is left as it is, and every arena is refused. Copies
nothing, and says nothing of snapshots that were stored before.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...session.durable_files import DurableFiles
from .protocol import MoverError, Reason

VERSION = 1
# Several faults with as many arenas as a mover opens; what is left out first is what was noted first.
SUSPECTS_MAX = 512
FILE_BYTES_MAX = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspect:
    """An arena by its path and its file (device and inode): another file at the same path is another arena."""

    arena: Path
    identity: tuple[int, int]
    gpu: str


class Suspects:
    """The arenas that were noted at `path`, whose folder is there. Belongs to one event loop, but for `save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = DurableFiles(path.parent)
        self._by_arena: dict[Path, Suspect] = {}
        self._unreadable = False
        self._unsaved = False
        self._lock = threading.Lock()
        self._load()

    def check(self, arena: Path, identity: tuple[int, int]) -> None:
        """Raise MoverError(FAULT) for an arena that was noted."""
        if self._unreadable:
            raise MoverError(
                Reason.FAULT,
                f"{self._path} cannot be read, so no KV is known to be untouched by a fault of a GPU; remove it when "
                "all engines were started anew",
            )
        noted = self._by_arena.get(arena)
        if noted is not None and noted.identity == identity:
            raise MoverError(
                Reason.FAULT,
                f"KV of {arena} may have been touched by the fault of {noted.gpu}; its sessions go on from snapshots "
                "that were stored before, or from the journal",
            )

    def add(self, suspects: Iterable[Suspect]) -> None:
        """Note arenas; they are refused from now on, and on disk once `save` has returned."""
        for suspect in suspects:
            if self._by_arena.get(suspect.arena) == suspect:
                continue
            self._by_arena.pop(suspect.arena, None)
            self._by_arena[suspect.arena] = suspect
            self._unsaved = True
        while len(self._by_arena) > SUSPECTS_MAX:
            left_out = self._by_arena.pop(next(iter(self._by_arena)))
            _log.error("event=suspect_left_out arena=%s gpu=%s", left_out.arena, left_out.gpu)

    def save(self) -> None:
        """Put on stable storage what is not there yet; for any thread. Raises OSError."""
        with self._lock:
            if not self._unsaved or self._unreadable:
                return
            # What is added while this is written is not saved by it.
            self._unsaved = False
            try:
                self._write([suspect for suspect in list(self._by_arena.values()) if _is_there(suspect)])
            except BaseException:
                self._unsaved = True
                raise

    def _load(self) -> None:
        try:
            raw = self._files.read(self._path, FILE_BYTES_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            self._refuse_all(error)
            return
        try:
            noted = _decode(raw)
            there = [suspect for suspect in noted if _is_there(suspect)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._refuse_all(error)
            return
        self.add(there)
        # It was on disk already; only those that are gone are news, and can wait.
        self._unsaved = False
        for suspect in there:
            _log.warning("event=suspect arena=%s gpu=%s", suspect.arena, suspect.gpu)
        if len(there) < len(noted):
            try:
                self._write(there)
            except OSError as error:
                _log.warning("event=suspects_not_tidied path=%s error=%s", self._path, error)

    def _refuse_all(self, error: Exception) -> None:
        self._unreadable = True
        _log.error("event=suspects_unreadable path=%s refused=all error=%s", self._path, error)

    def _write(self, suspects: list[Suspect]) -> None:
        if not suspects:
            self._files.remove(self._path)
            self._files.sync_folder(self._path.parent)
            return
        temporary = f"{self._path}.new"
        # What a mover has left that was killed while it wrote.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(_encode(suspects))
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._files.sync_folder(self._path.parent)


def suspects_beside(socket: str) -> Path:
    """Where the mover at `socket` notes them."""
    return Path(f"{socket}.suspects").absolute()


def _is_there(suspect: Suspect) -> bool:
    """Whether its file is still there; where that cannot be told it is taken to be."""
    try:
        status = suspect.arena.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return (status.st_dev, status.st_ino) == suspect.identity


def _encode(suspects: Iterable[Suspect]) -> bytes:
    noted = [{"arena": str(s.arena), "identity": list(s.identity), "gpu": s.gpu} for s in suspects]
    return json.dumps({"v": VERSION, "suspects": noted}).encode() + b"\n"


def _decode(raw: bytes) -> list[Suspect]:
    """The content of a file. ValueError, TypeError or KeyError for one that is none of ours."""
    body = json.loads(raw)
    if body["v"] != VERSION:
        raise ValueError(f"version {body['v']!r:.20} is not {VERSION}")
    found = []
    for noted in body["suspects"]:
        device, inode = noted["identity"]
        if not (isinstance(device, int) and isinstance(inode, int) and isinstance(noted["gpu"], str)):
            raise ValueError("an arena is noted in another way")
        found.append(Suspect(Path(noted["arena"]), (device, inode), noted["gpu"]))
    return found
