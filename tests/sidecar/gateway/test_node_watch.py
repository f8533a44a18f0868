"""How nodes are asked how they are: in time, each by itself, and whatever they answer."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate

import pytest

from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet.record import Readiness, Record, Role, encode
from midstream.sidecar.fleet_api import LIFE
from midstream.sidecar.gateway import node_watch
from midstream.sidecar.gateway.node_table import NodeTable
from midstream.sidecar.gateway.node_watch import NodeWatch, why_not_believed
from support.answers import Answer
from support.raw_engine import read_head
from support.scripted import Fate, Script, ScriptedEngine
from support.storeys import SECRET, Node, Storeys, storeys

ANSWER = Answer.words(12)
STALLS = Script(at=5, fate=Fate.STALLS)


def plain(name: str, *scripts: Script) -> Node:
    return Node(name, ScriptedEngine(ANSWER, *scripts, name=name))


def test_of_many_nodes_each_is_asked_less_often() -> None:
    table = NodeTable(on_lost=lambda node: None, on_change=lambda: None)
    urls = {f"node-{i}": "http://h:1" for i in range(1000)}
    few = NodeWatch(dict(list(urls.items())[:10]), table, SecretProver(SECRET), poll_s=1.0, lost_after_s=3.0)
    many = NodeWatch(urls, table, SecretProver(SECRET), poll_s=1.0, lost_after_s=3.0)
    assert (few.every_s, many.every_s) == (1.0, 4.0)


async def test_one_that_hangs_delays_no_other_and_costs_only_itself() -> None:
    nodes = [plain(f"node-{i}") for i in range(12)]
    async with storeys(*nodes, poll_s=0.1, lost_after_s=1.5) as fleet:
        for node in nodes[:6]:
            node.hang()
        await fleet.until(lambda: all(fleet.state(n.name) == "lost" for n in nodes[:6]))
        before = [n.polls for n in nodes[6:]]
        await asyncio.sleep(1.0)
        polled = [n.polls - b for n, b in zip(nodes[6:], before, strict=True)]
        assert min(polled) >= 2
        assert [fleet.state(n.name) for n in nodes[6:]] == ["ready"] * 6


async def test_questions_are_spread_over_the_interval() -> None:
    began: list[float] = []
    nodes = [plain(f"node-{i}") for i in range(40)]
    for node in nodes:
        check = node.believer.check

        def noting(*args: str, check: object = check, **more: bool) -> object:
            began.append(time.monotonic())
            return check(*args, **more)  # type: ignore[operator]

        node.believer.check = noting  # type: ignore[method-assign, assignment]
    async with storeys(*nodes, poll_s=1.0, lost_after_s=3.0):
        await asyncio.sleep(2.2)
    # Of the later ones no tenth of a second has more than half.
    late = sorted(t for t in began if t > began[0] + 1.0)
    assert len(late) >= 40
    fullest = max(sum(1 for t in late if at <= t < at + 0.1) for at in late)
    assert fullest < len(late) / 2


async def test_a_node_that_was_started_again_in_between_has_lost_its_sessions() -> None:
    a, b = plain("a", STALLS), plain("b")
    b.coordinator.ready_count = 0
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(fleet.client.complete())
        await a.coordinator.engines[0].meets_fate.wait()
        b.coordinator.ready_count = 1
        await fleet.until(lambda: fleet.state("b") == "ready")
        # As after a reboot of its machine: its end of the connection has not been heard of.
        a.headers[LIFE] = "another life"
        got = await asking
        assert got.finishes == ["length"]
        assert fleet.last()["outcomes"][0]["reason"] == "node_lost"
        await fleet.until(lambda: fleet.state("a") == "ready")


async def test_a_node_whose_clock_is_off_is_not_ready_and_the_gateway_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = Node("a", ScriptedEngine(ANSWER), believer=SecretBeliever(SECRET, clock=lambda: time.time() + 3600))
    a.headers["Date"] = formatdate(time.time() + 3600, usegmt=True)
    async with storeys(a, wait=False) as fleet:
        await fleet.until(lambda: a.polls > 2)
        status, told = await fleet.get("/readyz")
        assert (status, told["nodes"]) == (503, {"a": "lost"})
        assert re.search(r"clock is \+3(599|60\d) s off", told["troubles"]["a"])
        assert "set the clocks" in told["troubles"]["a"]
    assert caplog.text.count("event=node_silent node=a") == 1
    assert caplog.text.count("event=not_of_the_fleet") == 1
    assert "3600 s off" in caplog.text


async def test_a_secret_that_was_changed_while_sessions_ran_costs_none_of_them() -> None:
    a, b = plain("a", Script(gap_s=0.05)), plain("b", Script(gap_s=0.05))
    async with storeys(a, b, lost_after_s=1.0) as fleet:
        asking = asyncio.create_task(fleet.client.complete())
        await fleet.until(lambda: len(fleet.serving) == 1)
        [name] = fleet.serving
        other = b if name == "a" else a
        await other.lose()
        other.believer = SecretBeliever(b"another secret, of somebody else")
        await other.start()
        got = await asking
        assert got.finishes == ["length"]
        await fleet.until(lambda: fleet.state(other.name) == "lost")
        for _ in range(3):
            assert (await fleet.client.complete()).status == 200
        assert "the same secret" in (await fleet.get("/readyz"))[1]["troubles"][other.name]


@pytest.mark.parametrize(("off_s", "word"), [(0, "secret"), (20, "secret"), (31, "clock"), (-3600, "clock")])
def test_why_a_node_does_not_believe_is_told_by_its_clock(off_s: int, word: str) -> None:
    assert word in why_not_believed(formatdate(1e9 + off_s, usegmt=True), 1e9)


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Nov 2026 14:00:00 GMT"])
def test_a_date_that_is_none_says_nothing(date: str) -> None:
    assert "secret" in why_not_believed(date, 1e9)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[str]:
    """A node that answers every question so, piece by piece."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await read_head(reader):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class _Elsewhere(Node):
    """A node that is served by somebody else."""

    async def start(self) -> None:
        """It runs."""


def with_length(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _settled(fleet: Storeys) -> str:
    for _ in range(500):
        await asyncio.sleep(0.02)
        if fleet.state("a") != "unknown":
            break
    return fleet.state("a")


async def test_a_record_that_comes_in_pieces_is_read_whole() -> None:
    record = Record("a", Role.NODE, "http://h:1", readiness=Readiness.READY, models=tuple(f"m{i}" for i in range(60)))
    raw = with_length(encode(record).encode())
    async with answering(raw[:100], raw[100:101], raw[101:]) as url:
        node = _Elsewhere("a", ScriptedEngine(ANSWER))
        node.url = url
        async with storeys(node, wait=False) as fleet:
            assert await _settled(fleet) == "ready"


@pytest.mark.parametrize(
    "answer",
    [
        with_length(b"{}"),
        with_length(b'{"v": 2}'),
        with_length(b"\xff\xfe"),
        with_length(b"x" * (1 << 20)),
        with_length(b"", "404 Not Found"),
        with_length(b"boom", "500 Internal Server Error"),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
    ],
)
async def test_what_is_no_record_makes_no_node_and_no_noise(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with answering(answer) as url:
        node = _Elsewhere("a", ScriptedEngine(ANSWER))
        node.url = url
        async with storeys(node, wait=False) as fleet:
            assert await _settled(fleet) == "lost"
            assert (await fleet.get("/readyz"))[1]["troubles"]["a"]
    assert caplog.text.count("event=node_silent") == 1
    assert "Traceback" not in caplog.text


async def test_a_defect_of_ours_ends_the_watch_of_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode, fails = node_watch.decode, [True] * 3

    def broken(text: str) -> Record:
        if fails:
            fails.pop()
            raise RuntimeError("a defect")
        return decode(text)

    monkeypatch.setattr(node_watch, "decode", broken)
    async with storeys(plain("a"), poll_s=0.05) as fleet:
        assert fleet.state("a") == "ready"
    assert caplog.text.count("a defect") >= 3
