"""Ports for servers that are started on this machine, and started again at the same place.

Owns the choice. Invariant: outside of the range from which the kernel takes the ports of outgoing connections, wherever
there is room: else such a connection may have a server's port just when that is to be started again, or a client that
looks whether anybody listens there may meet itself. A port is free when it is asked for; nothing keeps it so.
"""

import errno
import random
import socket
from contextlib import ExitStack
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Linux's own default, where it does not say.
_EPHEMERAL = (32_768, 60_999)
_LOW = 10_000
_TRIES = 64


def free_port() -> int:
    """A port of the loopback address that nobody has now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many different ones. OSError when there are none."""
    draw = random.SystemRandom()
    with ExitStack() as held:
        found: list[int] = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            _bind(probe, draw)
            found.append(int(probe.getsockname()[1]))
        return found


def is_free(port: int) -> bool:
    """Whether a server could be started at a port of the loopback address."""
    with socket.socket() as probe:
        # As servers do: what only lingers after a connection is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        return True


def _bind(probe: socket.socket, draw: random.Random) -> None:
    low, high = _ephemeral()
    outside = [range(_LOW, low), range(max(high + 1, _LOW), 65_536)]
    places = [port for ports in outside for port in ports]
    for _ in range(_TRIES if places else 0):
        try:
            probe.bind(("127.0.0.1", draw.choice(places)))
            return
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    probe.bind(("127.0.0.1", 0))


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _EPHEMERAL
    return low, high
