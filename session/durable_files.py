"""File operations that are durable or did not happen: what the disk store writes with.

Owns modes (0600, 0700), the order of write, fsync and rename, and the removal of whatever was half done. Everything
raises OSError; what that means is the caller's business. Tests replace this class to make single operations fail.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path


class DurableFiles:
    """Writes whole files under one root. Temporary files lie in `root/tmp` and never bear a final name."""

    def __init__(self, root: Path) -> None:
        self._tmp = root / "tmp"
        self._numbers = itertools.count()

    def make_folder(self, path: Path, children: Iterable[str] = ()) -> None:
        """Create a folder with its parents and `children`, 0700, unless they are there; new ones survive a crash."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            self.sync_folder(path.parent)
        new = [path / name for name in children if not (path / name).is_dir()]
        for child in new:
            child.mkdir(mode=0o700, exist_ok=True)
        if new:
            self.sync_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        """Give `path` exactly this content, all at once; its entry is durable after `sync_folder`."""
        temporary = self._tmp / f"{os.getpid()}-{next(self._numbers)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def sync_folder(self, path: Path) -> None:
        """Put the entries of a folder on stable storage."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, bytes_max: int) -> bytes:
        """The content of a file of at most `bytes_max`; a longer one is an OSError."""
        # Without blocking: a pipe that lies there would be waited for, for ever, by whoever reads after this one, too.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
                raise OSError(f"not a file of at most {bytes_max} bytes")
            parts = []
            while part := os.read(fd, status.st_size + 1):
                parts.append(part)
                if sum(map(len, parts)) > status.st_size:
                    raise OSError("grew while it was read")
            return b"".join(parts)
        finally:
            os.close(fd)

    def size(self, path: Path) -> int | None:
        """The size of a file, or None if there is none."""
        try:
            return path.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        path.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove what writers left behind that were killed. Only for the one writer of the root, before it writes."""
        for path in self._tmp.iterdir():
            self.remove(path)
