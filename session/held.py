"""Host pools, descriptors of pools, and the client of the holder that keeps them (docs/formats.md).

Owns the making and mapping of pools in host memory, what can be told of any pool's descriptor without CUDA, its rescue,
and one short exchange with the holder per call: there is no connection to lose, so a holder that was restarted needs
nothing of its clients. Every wait is bounded. Standard library only: engine plugins import it. It does not know what is
in a pool (`layout.py`), and maps none on a GPU (`vram.py`).
"""

import fcntl
import json
import mmap
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PoolError
from .layout import HOST

MESSAGE_BYTES_MAX = 64 * 1024
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# The same on all architectures; Python has no function for it.
PIDFD_GETFD = 438
# Of the driver's devices, under whatever name they are seen in a container.
NVIDIA_MAJOR = 195


@dataclass(frozen=True, slots=True)
class HeldPool:
    """One line of the holder's list."""

    name: str
    size_bytes: int


def create_host_pool(size_bytes: int) -> int:
    """Make a zeroed pool in host memory and return its descriptor, sealed so that it can never change its size.

    Pages are allocated when they are first touched. Raises PoolError.
    """
    if size_bytes < 1:
        raise PoolError(f"a pool of {size_bytes} bytes cannot be made; give at least 1")
    try:
        fd = os.memfd_create("midstream-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PoolError(f"cannot make a pool: {error.strerror}; raise the limit on open files") from error
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise PoolError(
            f"cannot make a pool of {size_bytes} bytes: {error.strerror}; give the engine less KV memory"
        ) from error
    return fd


def check_pool(fd: int, size_bytes: int) -> None:
    """Raise PoolError unless `fd` is a memfd of `size_bytes` or more that cannot shrink.

    Without the seal, whoever else has the descriptor could take the pages away under a mapping: SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual = os.fstat(fd).st_size
    except OSError as error:
        raise PoolError(f"the descriptor is not a pool ({error.strerror}); pass a sealed memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise PoolError("the pool is not sealed against shrinking; make it with create_host_pool")
    if not 0 < size_bytes <= actual:
        raise PoolError(
            f"the pool has {actual} bytes, not the {size_bytes} that were announced; announce its real size"
        )


def map_pool(fd: int, size_bytes: int) -> mmap.mmap:
    """Map the first `size_bytes` of a pool, shared and writable; the descriptor may be closed afterwards. PoolError."""
    check_pool(fd, size_bytes)
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise PoolError(f"cannot map a pool of {size_bytes} bytes: {error}; free address space or memory") from error


def check_device_pool(fd: int) -> None:
    """Raise PoolError if `fd` can be no descriptor of device memory, as far as a process without CUDA can tell.

    Whose memory it is and how much of it only the driver knows: it says so to whoever maps it. What this keeps out are
    files and memfds that were announced as something else.
    """
    try:
        status = os.fstat(fd)
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        raise PoolError(f"the descriptor is not a pool ({error.strerror}); pass one that CUDA exported") from error
    kind = stat.S_IFMT(status.st_mode)
    named = os.path.basename(target).startswith("nvidia") or os.major(status.st_rdev) == NVIDIA_MAJOR
    # The kernel's nameless files have no type at all.
    nameless = kind == 0 and target.startswith("anon_inode:")
    if not (kind == stat.S_IFCHR and named) and not nameless:
        raise PoolError(f"{target:.80} is no device memory; announce it as what it is, or pass what CUDA exported")


def rescue(pid: int, fd_number: int, memory: str = HOST) -> int:
    """A descriptor of its own for a pool that process `pid` still has open as `fd_number`.

    For pools whose holder was killed: the owner still maps them, so the memory is there. Raises PoolError.
    """
    try:
        # What CUDA exported is bound to that very open file, so it cannot be opened again. What can be, should: it asks
        # for fewer rights.
        fd = _reopened(pid, fd_number) if memory == HOST else _duplicated(pid, fd_number)
    except PermissionError as error:
        raise PoolError(
            f"pool at descriptor {fd_number} of process {pid}: {error.strerror}; run the sidecar as the engine's user, "
            "and with CAP_SYS_PTRACE (or kernel.yama.ptrace_scope = 0) where the pool lies on a GPU"
        ) from error
    except OSError as error:
        raise PoolError(
            f"pool at descriptor {fd_number} of process {pid}: {error.strerror}; "
            "its owner is gone, so its sessions go on from disk or from the journal"
        ) from error
    try:
        if memory == HOST:
            check_pool(fd, 1)
        else:
            check_device_pool(fd)
    except PoolError:
        os.close(fd)
        raise
    return fd


def _reopened(pid: int, fd_number: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd_number}", os.O_RDWR | os.O_CLOEXEC)


def _duplicated(pid: int, fd_number: int) -> int:
    import ctypes

    process = os.pidfd_open(pid)
    try:
        fd = int(ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, fd_number, 0))
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
    # The kernel has set close-on-exec.
    return fd


class HolderClient:
    """Speaks with the holder at a socket; every call is one exchange and raises PoolError within `timeout_s`."""

    def __init__(self, path: Path | str, *, timeout_s: float = 2.0) -> None:
        self._path = str(path)
        self._timeout_s = timeout_s

    def put(self, name: str, fd: int, meta: Mapping[str, Any]) -> None:
        """Have the holder keep a pool; `fd` stays the caller's. Repeating it for the same memory renews the meta."""
        self._ask({"op": "put", "name": name, "meta": dict(meta)}, fd)

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        """A descriptor (the caller closes it) and the meta of a pool."""
        answer, fd = self._ask({"op": "get", "name": name})
        if fd is None or not isinstance(answer.get("meta"), dict):
            if fd is not None:
                os.close(fd)
            raise PoolError(
                f"pool {name}: the holder at {self._path} sent no descriptor; raise the limit on open files"
            )
        return fd, answer["meta"]

    def drop(self, name: str) -> bool:
        """Have the holder forget a pool; False if it had none of this name."""
        return bool(self._ask({"op": "drop", "name": name})[0].get("dropped"))

    def list(self) -> "list[HeldPool]":
        """All pools that the holder keeps, by name."""
        pools = self._ask({"op": "list"})[0].get("pools", [])
        return [HeldPool(str(p["name"]), int(p["size_bytes"])) for p in pools]

    def _ask(self, request: dict[str, Any], fd: int | None = None) -> tuple[dict[str, Any], int | None]:
        message = json.dumps(request, separators=(",", ":")).encode()
        if len(message) > MESSAGE_BYTES_MAX:
            raise PoolError(
                f"a message of {len(message)} bytes is above the holder's {MESSAGE_BYTES_MAX}; shorten the pool's meta"
            )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(self._path)
                socket.send_fds(connection, [message], [] if fd is None else [fd])
                reply, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PoolError(f"holder at {self._path}: {error}; start it, or wait until the sidecar has") from error
        received = fds[0] if fds else None
        try:
            answer = json.loads(reply)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
            if answer.get("ok") is not True:
                raise PoolError(f"holder at {self._path}: {answer.get('error', 'refused without a reason')}")
        except (ValueError, PoolError) as error:
            if received is not None:
                os.close(received)
            if isinstance(error, PoolError):
                raise
            raise PoolError(
                f"holder at {self._path} closed the connection or answered {reply[:80]!r}; restart the holder"
            ) from error
        return answer, received
