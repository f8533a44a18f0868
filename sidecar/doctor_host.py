"""Checks of this machine: Python, libraries, kernel, memory, limits, folders, port."""

import errno
import os
import platform
import resource
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..session.arena import Geometry
from .cli import LIBRARIES
from .config import Settings
from .doctor import Check, fail, ok, warn
from .processes import can_die_with_parent

INSTALL = 'in the checkout of midstream: pip install ".[sidecar]"'
# An older one cannot even install midstream.
_TESTED_PYTHONS = ((3, 11), (3, 12))
_OPEN_FILES_MIN = 4096
# Of each worker, the arenas of the present epoch and of the one before can be needed at once.
_EPOCHS = 2


def python(settings: Settings) -> Check:
    """The interpreter is one that midstream was tested with."""
    version = platform.python_version()
    if sys.version_info[:2] in _TESTED_PYTHONS:
        return ok("python", f"Python {version} at {sys.executable}")
    return warn("python", f"Python {version} was not tested", "use Python 3.11 or 3.12 to be sure")


def libraries(settings: Settings) -> Check:
    """The sidecar's libraries are there."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        return fail("libraries", f"{', '.join(missing)} not installed", INSTALL)
    return ok("libraries", f"all {len(LIBRARIES)} are installed")


def kernel(settings: Settings) -> Check:
    """memfd, pidfd and PDEATHSIG: without them pools cannot outlive an engine, and deaths are not seen at once."""
    missing = []
    if sys.platform != "linux":
        return fail("kernel", f"{sys.platform}", "run midstream on Linux 5.4 or newer")
    try:
        os.close(os.memfd_create("midstream-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        missing.append("memfd")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        missing.append("pidfd")
    if not can_die_with_parent():
        missing.append("PDEATHSIG")
    if missing:
        return fail(
            "kernel",
            f"Linux {platform.release()} has no {', '.join(missing)} here",
            "use Linux 5.4 or newer, and let the container's seccomp profile allow these calls",
        )
    return ok("kernel", f"Linux {platform.release()} with memfd, pidfd and PDEATHSIG")


def state_dir(settings: Settings) -> Check:
    """The folder for arenas and sockets can be used, and by nobody else."""
    folder = Path(settings.state_dir)
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        parent = _existing_parent(folder)
        if not os.access(parent, os.W_OK | os.X_OK):
            return fail(
                "state_dir", f"{folder} cannot be made in {parent}", "name another with --state-dir, or mend its mode"
            )
        return ok("state_dir", f"{folder} will be made")
    if not stat.S_ISDIR(found.st_mode):
        return fail("state_dir", f"{folder} is no folder", "name another with --state-dir")
    if found.st_uid != os.getuid():
        return fail("state_dir", f"{folder} belongs to user {found.st_uid}", "name another with --state-dir")
    if found.st_mode & 0o077:
        return fail("state_dir", f"{folder} is open to others (mode {found.st_mode & 0o777:o})", f"chmod 700 {folder}")
    return ok("state_dir", f"{folder} is this user's own")


def shared_memory(settings: Settings) -> Check:
    """There is room in memory for the arenas."""
    folder = _existing_parent(Path(settings.state_dir))
    figures = os.statvfs(folder)
    free = figures.f_bavail * figures.f_frsize
    arena = Geometry(settings.arena.slot_count, settings.arena.page_count).size_bytes
    needed = arena * _EPOCHS * max(len(settings.workers), settings.engine.worker_count)
    fact = f"{_mib(free)} free in {folder}, the arenas take {_mib(needed)}"
    if free < needed:
        return fail(
            "memory",
            fact,
            "give it more (docker run --shm-size, or mount -o remount,size=...), or lower arena.page_count",
        )
    if not _is_tmpfs(folder):
        return warn(
            "memory", f"{fact}; it is no tmpfs", "put state_dir on /dev/shm: on a disk each token costs a write"
        )
    return ok("memory", fact)


def open_files(settings: Settings) -> Check:
    """Enough descriptors for clients, engines and pools."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES_MIN:
        return warn(
            "open files",
            f"the limit is {soft} (at most {hard}); each stream takes two",
            f"ulimit -n {max(_OPEN_FILES_MIN, min(hard, 65_536))}",
        )
    return ok("open files", f"the limit is {soft}")


def port(settings: Settings) -> Check:
    """The port can be listened on."""
    host, number = settings.listen.host, settings.listen.port
    place = f"{host}:{number}"
    if number == 0:
        return ok("port", f"a free one on {host}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Only listening tells whether somebody else listens there already.
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return warn("port", f"{place} is in use", "a sidecar that runs already, or choose another with --port")
        return fail("port", f"{place} cannot be listened on ({error})", "choose another with --host and --port")
    return ok("port", f"{place} is free")


def store(settings: Settings) -> Check:
    """The folder for snapshots can be written and has room."""
    if settings.store.dir is None:
        return ok("store", "no snapshots on disk are wanted (store.dir is not set)")
    folder = Path(settings.store.dir)
    existing = _existing_parent(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".midstream-doctor-"):
            pass
    except OSError as error:
        return fail("store", f"{existing} cannot be written ({error.strerror})", "mend its mode or name another folder")
    figures = os.statvfs(existing)
    free = figures.f_bavail * figures.f_frsize
    fact = (
        f"{folder} can be written; snapshots may take {_mib(settings.store.bytes_max)}, the disk has {_mib(free)} free"
    )
    if free < settings.store.bytes_max:
        return warn("store", fact, "lower store.bytes_max or give it more room; when full, new snapshots stop")
    return ok("store", fact)


CHECKS: Sequence[Callable[[Settings], Check]] = (
    python,
    libraries,
    kernel,
    state_dir,
    shared_memory,
    open_files,
    port,
    store,
)


def _existing_parent(folder: Path) -> Path:
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _is_tmpfs(folder: Path) -> bool:
    """Whether a folder lies in memory, as /proc/self/mounts tells it: the longest mount point that leads there."""
    real = folder.resolve()
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        if real.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind in ("tmpfs", "ramfs", "hugetlbfs")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
