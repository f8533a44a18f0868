"""Sockets to workers and nodes, which a path that is cut ends in time.

Owns what the kernel is told of them. Invariant: where nothing of the other machine's kernel is heard for HEARD_S, the
connection breaks. Its processes may be as silent as they like: that is `stall`'s to judge, which waits long for a slow
engine, and has to; a cut path says nothing of an engine, and no lease tells of it where only this path is cut.
"""

import socket
from typing import Any

HEARD_S = 10
# Asked after so much silence, and so often.
_IDLE_S, _ASK_S = 4, 2


def upstream_socket(address: Any) -> socket.socket:
    """An open socket for an address as `getaddrinfo` gives it."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (HEARD_S - _IDLE_S) // _ASK_S)
        # The same for what was sent and not acknowledged, of which the kernel asks nothing.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, HEARD_S * 1000)
    except OSError:
        made.close()
        raise
    return made
