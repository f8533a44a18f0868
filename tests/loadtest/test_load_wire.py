"""The wire between sidecar and worker: what goes through it is untouched, until it is cut or slowed."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from midstream.loadtest.load.relay import Relay, ask, main, wrapped
from midstream.session.errors import EngineError
from midstream.session.ports import free_port

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


async def test_a_cut_reaches_the_wire_of_its_port_and_is_over_by_itself(wire: Wire) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    await ask(wire.folder, wire.port, {"op": "cut", "for_s": 0.2})
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    async with asyncio.timeout(UP_S):
        while True:
            try:
                assert await wire.say(b"z") == b"z"
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.02)


async def test_a_slow_wire_reaches_the_wire_of_its_port_and_loses_nothing(wire: Wire) -> None:
    await ask(wire.folder, wire.port, {"op": "slow", "for_s": 600.0, "delay_s": 0.01, "bytes_per_s": 100_000})
    text = bytes(range(256)) * 20
    assert await wire.say(text) == text


# ---- the relay itself, on a clock of the test's


class Clock:
    """Time that passes only where somebody waits for it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


class Held:
    """A relay in this process, with an engine that says back what it is told."""

    def __init__(self, port: int, relay: Relay, clock: Clock) -> None:
        self.port = port
        self.relay = relay
        self.clock = clock

    async def fault(self, **request: object) -> bytes:
        """What the relay answers to a request for a fault."""
        theirs, ours = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        other_reader, other_writer = await asyncio.open_connection(sock=theirs)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await self.relay.obey(other_reader, other_writer)
            return await reader.readline()
        finally:
            for one in (writer, other_writer):
                one.close()
                await one.wait_closed()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, text: bytes) -> bytes:
        reader, writer = await self.open()
        try:
            writer.write(text)
            return await asyncio.wait_for(reader.readexactly(len(text)), UP_S)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest_asyncio.fixture
async def held() -> AsyncIterator[Held]:
    clock = Clock()
    connections: set[asyncio.Task[None]] = set()

    def serving(handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Any:
        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            await handle(reader, writer)

        return asyncio.start_server(one, "127.0.0.1", 0)

    engine = await serving(_echo)
    relay = Relay(engine.sockets[0].getsockname()[1], now_s=clock, pause=clock.pause)
    front = await serving(relay.carry)
    yield Held(front.sockets[0].getsockname()[1], relay, clock)
    front.close()
    engine.close()
    # All clients have gone, so each of these comes to its end.
    await asyncio.wait_for(asyncio.gather(*connections), UP_S)
    # An aborted transport closes its socket one turn of the loop later.
    await asyncio.sleep(0)


async def test_a_cut_ends_what_is_open_and_refuses_what_comes_until_its_time_is_over(held: Held) -> None:
    reader, writer = await held.open()
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    assert await held.fault(op="cut", for_s=5.0) == b"ok\n"
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    for moment_s in (1000.0, 1002.5, 1004.999):
        held.clock.now_s = moment_s
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await held.say(b"y")
    held.clock.now_s = 1005.0
    assert await held.say(b"z") == b"z"


async def test_a_slow_wire_delays_each_piece_by_itself_and_by_its_length(held: Held) -> None:
    assert await held.fault(op="slow", for_s=600.0, delay_s=0.3, bytes_per_s=0) == b"ok\n"
    assert await held.say(b"x") == b"x"
    assert held.clock.pauses_s == [0.3]
    held.clock.pauses_s.clear()
    assert await held.fault(op="slow", for_s=600.0, delay_s=0, bytes_per_s=1000) == b"ok\n"
    assert await held.say(b"x" * 400) == b"x" * 400
    # However many pieces it came in.
    assert sum(held.clock.pauses_s) == pytest.approx(0.4)


async def test_a_slow_wire_is_quick_again_when_its_time_is_over_and_holds_nothing_beyond(held: Held) -> None:
    assert await held.fault(op="slow", for_s=2.0, delay_s=5, bytes_per_s=1) == b"ok\n"
    assert await held.say(b"x") == b"x"
    assert held.clock.pauses_s == [2.0]
    assert await held.say(b"y") == b"y"
    assert held.clock.pauses_s == [2.0]


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
