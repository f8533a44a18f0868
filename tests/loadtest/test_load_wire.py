"""The wire between sidecar and worker: what goes through it is untouched, until it is cut or slowed."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from midstream.loadtest.load.relay import ask, main, wrapped
from midstream.session.errors import EngineError

# Says back what it is told, as an engine that is told its port.
ECHO = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Echo).serve_forever()
"""
UP_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Wire:
    """A relay with its engine."""

    def __init__(self, folder: Path, port: int, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.port = port
        self.process = process

    async def say(self, text: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(text)
            await writer.drain()
            return await asyncio.wait_for(reader.readexactly(len(text)), 10)
        finally:
            writer.close()

    def engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]


@pytest_asyncio.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    command, environ = wrapped([sys.executable, "-c", ECHO], tmp_path)
    port = free_port()
    process = await asyncio.create_subprocess_exec(*command, "--port", str(port), env={**os.environ, **environ})
    found = Wire(tmp_path, port, process)
    deadline_s = time.monotonic() + UP_S
    while True:
        try:
            assert await found.say(b"up") == b"up"
            break
        except (OSError, asyncio.IncompleteReadError):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
    yield found
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_what_goes_through_is_untouched(wire: Wire) -> None:
    text = bytes(range(256)) * 2000
    assert await wire.say(text) == text


async def test_a_cut_ends_what_is_open_refuses_what_comes_and_is_over_in_time(wire: Wire) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    began_s = time.monotonic()
    await ask(wire.folder, wire.port, {"op": "cut", "for_s": 1.0})
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await wire.say(b"y")
    while True:
        try:
            await wire.say(b"z")
            break
        except (ConnectionError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.02)
    assert 0.9 <= time.monotonic() - began_s < 15


async def test_a_slow_wire_delays_each_piece_and_is_quick_again(wire: Wire) -> None:
    await ask(wire.folder, wire.port, {"op": "slow", "for_s": 30.0, "delay_s": 0.3, "bytes_per_s": 0})
    began_s = time.monotonic()
    await wire.say(b"x")
    assert time.monotonic() - began_s >= 0.3
    await ask(wire.folder, wire.port, {"op": "slow", "for_s": 30.0, "delay_s": 0, "bytes_per_s": 1000})
    began_s = time.monotonic()
    await wire.say(b"x" * 400)
    assert time.monotonic() - began_s >= 0.4
    await ask(wire.folder, wire.port, {"op": "slow", "for_s": 0.0, "delay_s": 5, "bytes_per_s": 1})
    assert await asyncio.wait_for(wire.say(b"x"), 4) == b"x"


async def test_nonsense_is_refused_and_a_relay_that_is_not_there_is_said(wire: Wire, tmp_path: Path) -> None:
    for request in ({"op": "dance", "for_s": 1.0}, {"op": "cut"}, {"op": "slow", "for_s": 1.0}):
        with pytest.raises(EngineError, match="refused"):
            await ask(wire.folder, wire.port, request)
    assert await wire.say(b"x") == b"x"
    with pytest.raises(EngineError, match="does not answer"):
        await ask(tmp_path, 1, {"op": "cut", "for_s": 1.0})


async def test_the_engine_dies_with_its_wire_and_the_wire_with_its_engine(wire: Wire) -> None:
    engine = wire.engine()
    wire.process.kill()
    await asyncio.to_thread(engine.wait, 10)


async def test_a_signal_reaches_the_engine_and_its_status_comes_back(wire: Wire) -> None:
    wire.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(wire.process.wait(), 20) == 128 + signal.SIGTERM


async def test_a_killed_engine_ends_the_wire(wire: Wire) -> None:
    wire.engine().kill()
    assert await asyncio.wait_for(wire.process.wait(), 20) == 128 + signal.SIGKILL


def test_a_command_without_a_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine"]) == 2
    assert "--port" in capsys.readouterr().err
