"""The folder in memory where sockets and arenas lie: made, checked, and owned by one sidecar at a time.

Invariant: only its owner may enter it, and two sidecars never work in the same one. A folder in which nothing is of use
to anybody any more goes with its sidecar.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..session.errors import ConfigError
from .leaving import tidy

LOCK = "sidecar.lock"
URL = "url"
_TRIES = 10
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@contextlib.contextmanager
def owned_state_dir(path: Path) -> Iterator[Path]:
    """The folder, locked for this process. ConfigError says who or what is in the way."""
    for _ in range(_TRIES):
        if (lock := _locked(path)) is not None:
            break
    else:
        raise ConfigError(f"state_dir {path}: somebody removes it again and again; choose another")
    try:
        yield path
    finally:
        tidy(path)
        # While the lock is held: whoever waits for it sees that it is not that file any more.
        with contextlib.suppress(OSError):
            if not any(entry.name != LOCK for entry in path.iterdir()):
                (path / LOCK).unlink()
                path.rmdir()
        os.close(lock)


def _locked(path: Path) -> int | None:
    """The descriptor of the folder's lock; the folder is made if need be.

    None when whoever ended a moment ago has removed the folder while it was being opened here.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"state_dir {path}: {error.strerror}; choose a folder that you may write to") from error
    if status.st_uid != os.getuid():
        raise ConfigError(f"state_dir {path}: it belongs to user {status.st_uid}; choose one of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"state_dir {path}: others may enter it; run chmod 700, or choose another")
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"state_dir {path}: {error.strerror}; choose a folder that you may write to") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"state_dir {path}: another sidecar works there; stop it, or give each its own --state-dir"
        ) from None
    with contextlib.suppress(OSError):
        if (path / LOCK).stat().st_ino == os.fstat(lock).st_ino:
            return lock
    os.close(lock)
    return None


def reachable_url(host: str, port: int) -> str:
    """Where something that listens on `host` can be asked from this machine."""
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def told_url(path: Path, url: str) -> Iterator[None]:
    """Say in the folder, while this lasts, where its sidecar listens: its port may be the engine's, or any free one.

    Only commands that ask the sidecar want to know it; where it cannot be written, they have to be told.
    """
    temporary = path / f".{URL}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(url)
        temporary.replace(path / URL)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / URL).unlink(missing_ok=True)


def listening_url(path: Path) -> str | None:
    """Where the sidecar of a folder of this user's listens, as it said itself; None when none has."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return (path / URL).read_text().strip() or None
    except (OSError, ValueError):
        return None
