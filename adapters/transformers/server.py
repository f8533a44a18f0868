"""The embedded engine as a process: `python -m midstream.adapters.transformers.server --model DIR --port N`.

Owns arguments, the port and the exit status. The port is taken first and torch imported last, so that what is plainly
wrong is said at once; connections are refused until everything behind them is ready.
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
from typing import Any

from ...session.errors import EngineError, MidstreamError

# What the kernel may buffer for a client that does not read: enough for a burst, little enough that the session stops.
SEND_BUFFER_BYTES = 256 * 1024


def _bound(host: str, port: int) -> socket.socket:
    """The port, taken before the minutes of loading; connections are refused until the server listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def _at_least(least: int) -> Any:
    def whole(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return whole


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="midstream.adapters.transformers.server", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a causal language model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_at_least(0), default=8000, help="0 takes any free port (see the log)")
    parser.add_argument("--served-model-name", help="name for clients (default: the folder's)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--kv-cache-bytes", type=_at_least(1), help="memory for keys and values")
    parser.add_argument("--block-tokens", type=_at_least(1), default=16)
    parser.add_argument("--max-sessions", type=_at_least(1), default=16, help="sessions that decode at once")
    parser.add_argument("--max-waiting", type=_at_least(1), default=64, help="requests that may wait for room")
    parser.add_argument(
        "--threads",
        type=_at_least(1),
        default=os.cpu_count() or 1,
        help="CPU threads; part of the compatibility key, as it changes the last bits",
    )
    parser.add_argument("--grace-seconds", type=float, default=30.0, help="time to finish streams after SIGTERM")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is told to stop; 2 when it cannot start."""
    args = _arguments(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        listener = _bound(args.host, args.port)
        from .wiring import Server

        asyncio.run(Server(args, listener).run())
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
