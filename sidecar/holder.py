"""The holder: keeps the descriptors of KV pools, so that the pools outlive every engine and the sidecar itself.

    python -m midstream.sidecar.holder --socket PATH [--pools-max N] [--idle-s S]

Owns the holder socket (docs/formats.md) and nothing else: it maps no pool, reads no pool and never acts by itself, but
for one thing: when it holds nothing and nobody has asked for anything in so long, it ends (a sidecar asks each second).
It never loads CUDA either: of memory on a GPU it keeps the descriptor, which is all that such memory needs to live.
Invariant: no client can end it or make it grow: names, metas, pools, connections and messages are bounded, and whatever
cannot be understood is answered with an error or a closed connection. SIGTERM ends it. Standard library only, one
thread, so that there is as little as possible in it that could die.
"""

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..session.errors import ConfigError, PoolError
from ..session.held import MESSAGE_BYTES_MAX, check_device_pool, check_pool
from ..session.layout import HOST, NAME_BYTES_MAX, PoolMeta
from .private_socket import peer_uid, private_socket

POOLS_MAX = 64
POOLS_MAX_LIMIT = 256
CONNECTIONS_MAX = 128
FDS_PER_MESSAGE = 4
LOG_BYTES_MAX = 64 * 1024
# Longer than a sidecar is away for a restart, and longer than most engines take to bring their pool meanwhile.
IDLE_S = 600.0
# Well within what a selector can wait for.
IDLE_S_LIMIT = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Held:
    """One pool: its descriptor and its meta, as it was put."""

    fd: int
    meta: dict[str, Any]
    identity: tuple[int, int] | str


class Pools:
    """The pools by name, bounded in number; every descriptor in here is open until it is dropped."""

    def __init__(self, count_max: int) -> None:
        self._held: dict[str, Held] = {}
        self._count_max = count_max

    def put(self, name: str, fd: int, body: object) -> None:
        """Keep a pool; takes `fd` over only when it returns. PoolError says what is wrong with the pool or its meta."""
        meta = PoolMeta.from_json(body)
        identity = _checked(fd, meta)
        known = self._held.get(name)
        if known is not None and known.identity != identity:
            raise PoolError(
                f"pool {name} is held already, with other memory; drop it first or use the next epoch's name"
            )
        if known is None and len(self._held) >= self._count_max:
            raise PoolError(f"{len(self._held)} pools are held, which is the limit; drop one or raise --pools-max")
        self._held[name] = Held(fd, meta.to_json(), identity)
        if known is not None:
            os.close(known.fd)

    def get(self, name: str) -> Held:
        """The pool of that name. Raises PoolError."""
        try:
            return self._held[name]
        except KeyError:
            raise PoolError(
                f"no pool {name} is held; its engine has to put it, or the sidecar has to rescue it from the engine"
            ) from None

    def drop(self, name: str) -> bool:
        """Forget a pool; its memory lives on only where somebody else maps it."""
        held = self._held.pop(name, None)
        if held is not None:
            os.close(held.fd)
        return held is not None

    def listing(self) -> list[dict[str, Any]]:
        """Names and sizes, in the order of their names."""
        return [{"name": n, "size_bytes": h.meta["size_bytes"]} for n, h in sorted(self._held.items())]


class Holder:
    """The event loop around `Pools`: one request and one answer at a time, nothing buffered."""

    def __init__(self, listener: socket.socket, pools: Pools) -> None:
        self._listener = listener
        self._pools = pools
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # Insertion order is the order of last use: the first one is the one to close when there are too many.
        self._connections: dict[socket.socket, None] = {}

    def run(self, idle_s: float) -> None:
        """Serve until a signal handler raises, or nothing was held and nobody has asked for `idle_s`."""
        heard_s = time.monotonic()
        while True:
            limit_s = None if self._pools.listing() else max(heard_s + idle_s - time.monotonic(), 0.0)
            found = self._selector.select(limit_s)
            if not found and time.monotonic() - heard_s >= idle_s:
                return
            heard_s = time.monotonic()
            for key, _ in found:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            self._close(next(iter(self._connections)))
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # Out of descriptors, most likely: one idle client less, and the next round tries again.
            if self._connections:
                self._close(next(iter(self._connections)))
            return
        connection.setblocking(False)
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        self._connections[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _close(self, connection: socket.socket) -> None:
        del self._connections[connection]
        self._selector.unregister(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        self._connections[connection] = self._connections.pop(connection)
        try:
            message, fds, flags, _ = socket.recv_fds(
                connection, MESSAGE_BYTES_MAX, FDS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        kept = False
        try:
            if not message:
                self._close(connection)
                return
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise PoolError(f"message cut off; send at most {MESSAGE_BYTES_MAX} bytes and one descriptor")
            reply, out, kept = self._answer(message, fds)
        except PoolError as error:
            reply, out = {"ok": False, "error": str(error)[:2048]}, None
        finally:
            for fd in fds[1:] if kept else fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        try:
            socket.send_fds(connection, [json.dumps(reply).encode()], [] if out is None else [out])
        except OSError:
            # A client that does not read its answers loses its connection, never our time.
            self._close(connection)

    def _answer(self, message: bytes, fds: list[int]) -> tuple[dict[str, Any], int | None, bool]:
        """The reply, the descriptor to send with it, and whether the received one is kept now."""
        try:
            request = json.loads(message)
        except (ValueError, RecursionError):
            raise PoolError("message is not JSON; send one JSON object a message") from None
        if not isinstance(request, dict):
            raise PoolError("message is not a JSON object")
        match request.get("op"):
            case "put":
                if len(fds) != 1:
                    raise PoolError(f"put came with {len(fds)} descriptors; send exactly one")
                self._pools.put(_name(request), fds[0], request.get("meta"))
                return {"ok": True}, None, True
            case "get":
                held = self._pools.get(_name(request))
                return {"ok": True, "meta": held.meta}, held.fd, False
            case "drop":
                return {"ok": True, "dropped": self._pools.drop(_name(request))}, None, False
            case "list":
                return {"ok": True, "pools": self._pools.listing()}, None, False
            case other:
                raise PoolError(f"unknown op {other!r:.40}; use put, get, drop or list")


def _checked(fd: int, meta: PoolMeta) -> tuple[int, int] | str:
    """What is equal exactly for descriptors of the same memory. Raises PoolError for what is no pool of that kind."""
    if meta.memory != HOST:
        check_device_pool(fd)
        return meta.identity
    check_pool(fd, meta.size_bytes)
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _name(request: dict[str, Any]) -> str:
    name = request.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_BYTES_MAX or not name.isascii() or not name.isprintable():
        raise PoolError(f"pool name {name!r:.80}: use 1 to {NAME_BYTES_MAX} printable ASCII characters")
    return name


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _write_to(log: str) -> None:
    """Let go of the sidecar's output: a pipe that is still open here would never end for whoever reads it.

    What is written from here on is the traceback of a defect, at most; the log keeps those of holders before this one.
    """
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(fd).st_size > LOG_BYTES_MAX:
            os.ftruncate(fd, 0)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for output in (1, 2):
        os.dup2(fd, output)
    os.close(fd)


def main(arguments: list[str] | None = None) -> int:
    """Hold pools until SIGTERM or until nobody needs it, which is exit status 0; 1 when it cannot."""
    parser = argparse.ArgumentParser(prog="midstream.sidecar.holder", description="Keeps KV pools alive.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--pools-max", type=int, default=POOLS_MAX)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    options = parser.parse_args(arguments)
    if not 1 <= options.pools_max <= POOLS_MAX_LIMIT:
        parser.error(f"--pools-max must be 1 to {POOLS_MAX_LIMIT}")
    if not 0 < options.idle_s <= IDLE_S_LIMIT:
        parser.error(f"--idle-s must be more than 0 and at most {IDLE_S_LIMIT:g}")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    try:
        with private_socket(options.socket, socket.SOCK_SEQPACKET, backlog=CONNECTIONS_MAX) as listener:
            _write_to(options.socket + ".log")
            Holder(listener, Pools(options.pools_max)).run(options.idle_s)
            return 0
    except ConfigError as error:
        print(f"holder: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
