"""Unix sockets that only one process serves and only its own user can use.

Owns the socket file and the lock beside it: mode 0600, a stale file replaced only when nobody answers on it, the file
removed at the end only if it is still ours. Standard library only: the holder stands on it.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator

from ..session.errors import ConfigError

_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket: the one that listens, where the other end is a listener."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


@contextlib.contextmanager
def private_socket(path: str, kind: int, *, backlog: int) -> Iterator[socket.socket]:
    """A non-blocking listening socket of `kind` at `path`. ConfigError says who or what is in the way."""
    lock = _lock(path)
    try:
        listener = _listen(path, kind, backlog)
        try:
            mine = os.lstat(path).st_ino
            yield listener
        finally:
            listener.close()
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == mine:
                    os.unlink(path)
    finally:
        os.close(lock)


def _lock(path: str) -> int:
    """Take the lock beside the socket, so that of two that start at once one cannot replace the other's socket."""
    try:
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}.lock: {error.strerror}; give a socket path in a folder of your own") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"{path}: another process serves it; use that one, or stop it first") from error
    return fd


def _listen(path: str, kind: int, backlog: int) -> socket.socket:
    if os.path.lexists(path):
        _remove_stale(path, kind)
    listener = socket.socket(socket.AF_UNIX, kind)
    before = os.umask(0o177)
    # Under its name only when it listens: whoever sees the file can connect.
    unready = path + ".new"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)
        listener.bind(unready)
        listener.listen(backlog)
        os.rename(unready, path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {path}: {error.strerror or error}; give a shorter path, in a folder of your own"
        ) from error
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _remove_stale(path: str, kind: int) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"{path} exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}; stop what listens there or give another path"
            ) from error
        else:
            raise ConfigError(f"{path}: somebody answers there; use that one, or stop it first")
