"""The socket that clients connect to."""

import socket

from ..session.errors import ConfigError

# What the kernel may keep for a client that does not read; left to itself it would take 4 MB for each.
SEND_BUFFER_BYTES = 256 * 1024
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError names the address and what is in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port} ({why}); stop what uses it, or choose another --port"
        ) from error
    listener.setblocking(False)
    return listener
