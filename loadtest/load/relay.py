"""A worker behind a wire that can be cut or slowed: `relay ENGINE COMMAND... --port N` serves N, the engine another.

Owns the connections between sidecar and engine, and the engine's process: it ends with it, and takes it along. It is
put in front of an engine's command only where a fault plan touches the network. Both directions are copied as they
come; what is slowed is the way from the engine. One line of JSON on a unix socket beside it asks for a fault.
"""

import asyncio
import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...session.errors import EngineError
from ...session.ports import free_port

FOLDER_VARIABLE = "MIDSTREAM_LOADTEST_RELAYS"
PIECE_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


def wrapped(command: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command with a relay in front, and what its environment needs: one word, so that it is still recognised."""
    script = folder / "relay"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__name__} "$@"\n')
    script.chmod(stat.S_IRWXU)
    return [str(script), *command], {FOLDER_VARIABLE: str(folder)}


async def ask(folder: Path, port: int, request: dict[str, Any], *, timeout_s: float = 10.0) -> None:
    """Ask the relay of a port for a fault; EngineError when it does not do it."""
    path = folder / f"{port}.sock"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                if await reader.readline() != b"ok\n":
                    raise EngineError(f"relay {path}: it refused {request}")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise EngineError(f"relay {path}: does not answer ({error!r}); is its worker running?") from error


class Relay:
    """The wire: `cut_until_s` and `slow_until_s` say until when it is disturbed, by its clock."""

    def __init__(
        self,
        upstream_port: int,
        *,
        now_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._upstream_port = upstream_port
        self._now_s = now_s
        self._pause = pause
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut_until_s = 0.0
        self._slow_until_s = 0.0
        self._delay_s = 0.0
        self._bytes_per_s = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the sidecar, to its end."""
        if self._now_s() < self._cut_until_s:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        try:
            await asyncio.gather(
                self._copy(reader, up_writer, slowed=False), self._copy(up_reader, writer, slowed=True)
            )
        finally:
            self._writers -= {writer, up_writer}
            for one in (writer, up_writer):
                one.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slowed: bool) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if slowed and (left_s := self._slow_until_s - self._now_s()) > 0:
                    pause_s = self._delay_s + (len(piece) / self._bytes_per_s if self._bytes_per_s else 0.0)
                    await self._pause(min(pause_s, left_s))
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request for a fault."""
        try:
            told = json.loads(await reader.readline())
            until_s = self._now_s() + float(told["for_s"])
            match told["op"]:
                case "cut":
                    self._cut_until_s = until_s
                    for one in list(self._writers):
                        one.transport.abort()
                case "slow":
                    self._slow_until_s = until_s
                    self._delay_s, self._bytes_per_s = float(told["delay_s"]), float(told["bytes_per_s"])
                case _:
                    raise ValueError(told["op"])
            writer.write(b"ok\n")
        except (ValueError, KeyError, TypeError) as error:
            writer.write(f"bad request: {error!r}\n".encode())
        with suppress(OSError):
            await writer.drain()
        writer.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _serve(command: Sequence[str]) -> int:
    at = len(command) - 1 - command[::-1].index("--port")
    port, upstream_port = int(command[at + 1]), free_port()
    argv = [*command[: at + 1], str(upstream_port), *command[at + 2 :]]
    relay = Relay(upstream_port)
    control = Path(os.environ[FOLDER_VARIABLE]) / f"{port}.sock"
    control.unlink(missing_ok=True)
    # It must not outlive the wire that it is behind.
    engine = subprocess.Popen(argv, preexec_fn=_die_with_parent)  # noqa: ASYNC220
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, engine.send_signal, number)
    obeying = await asyncio.start_unix_server(relay.obey, str(control))
    carrying = await asyncio.start_server(relay.carry, "127.0.0.1", port)
    try:
        status = await asyncio.to_thread(engine.wait)
    finally:
        obeying.close()
        carrying.close()
    return status if status >= 0 else 128 - status


def main(command: Sequence[str]) -> int:
    """Run the engine and its wire; the engine's exit status."""
    if "--port" not in command or FOLDER_VARIABLE not in os.environ:
        print(f"midstream: the relay needs --port in the engine's command, and {FOLDER_VARIABLE}", file=sys.stderr)
        return 2
    return asyncio.run(_serve(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
