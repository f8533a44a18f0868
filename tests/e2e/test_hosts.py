"""Hosts of tests are hosts: they reach each other, are cut in silence, are slow where that was asked, and die whole."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from support.host_wire import Link, Way
from support.hosts import Host, Hosts, why_not

pytestmark = pytest.mark.service

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes(int(self.path[1:])))
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 80), Handler).serve_forever()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts()
    try:
        yield hosts
    finally:
        hosts.close()


def serve(host: Host, folder: Path) -> "subprocess.Popen[bytes]":
    """Something that answers on a host."""
    return host.start([sys.executable, "-c", SERVER], log=folder / "log")


async def get(hosts: Hosts, host: Host, size: int = 2, within_s: float = 1.0) -> float:
    """How long a request of this process takes; TimeoutError where nothing comes."""
    began_s = time.monotonic()
    async with aiohttp.ClientSession(connector=hosts.connector()) as http, asyncio.timeout(within_s):
        while True:
            try:
                async with http.get(f"http://{host.address}/{size}") as answer:
                    assert len(await answer.read()) == size
                    return time.monotonic() - began_s
            except aiohttp.ClientConnectorError:
                # It is starting.
                began_s = time.monotonic()
                await asyncio.sleep(0.02)


async def test_hosts_reach_each_other_and_a_cut_one_is_silent_until_it_is_healed(hosts: Hosts, tmp_path: Path) -> None:
    one, other = hosts.add(), hosts.add()
    serve(one, tmp_path)
    await get(hosts, one, within_s=10)
    ask = (sys.executable, "-c", f"import urllib.request as u; u.urlopen('http://{one.address}/2', timeout=0.5)")
    assert other.run(*ask).returncode == 0
    one.cut()
    with pytest.raises(TimeoutError):
        await get(hosts, one, within_s=0.3)
    one.heal()
    await get(hosts, one)
    one.cut_from(other)
    # A timeout and no refusal: nobody has told it that there is nothing.
    assert "timed out" in other.run(*ask).stderr
    await get(hosts, one)
    one.heal_from(other)
    assert other.run(*ask).returncode == 0


async def test_a_wire_is_as_slow_and_as_long_as_was_asked(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.add(Link(bytes_per_s=1e6, delay_s=0.05))
    serve(host, tmp_path)
    await get(hosts, host, within_s=10)
    # There and back twice: a connection, and a request over it.
    assert 0.2 <= await get(hosts, host) < 0.5
    assert 0.6 <= await get(hosts, host, 500_000, within_s=5) < 1.5
    host.change_link(Link())
    assert await get(hosts, host) < 0.2


async def test_over_a_wire_that_loses_packets_all_arrives_later(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.add(Link(loss=0.05, delay_s=0.002))
    serve(host, tmp_path)
    await get(hosts, host, within_s=20)
    await get(hosts, host, 2_000_000, within_s=20)


def test_a_way_loses_its_share_and_never_more_than_its_queue_lets_wait() -> None:
    way = Way(random.Random(1).random)
    way.link = Link(bytes_per_s=1e6, delay_s=0.1, loss=0.2, queue_bytes=10_000)
    for _ in range(20):
        way.take(0.0, bytes(1000))
    assert way.arrived(0.1) == []
    assert 5 <= len(way.arrived(0.1101)) <= 10
    for n in range(1000):
        way.take(1.0 + n, b"x")
    assert 750 <= len(way.arrived(2000.0)) <= 850


def test_a_destroyed_host_leaves_no_process(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.add()
    started = host.start(["sh", "-c", "sleep 4567 & setsid sleep 4567 & sleep 4567"], log=tmp_path / "log")
    deadline_s = time.monotonic() + 10
    while _sleepers("4567") < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    host.destroy()
    assert started.poll() is not None
    assert _sleepers("4567") == 0


def test_hosts_end_with_the_process_that_has_them_even_if_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from support.hosts import Hosts, Link
hosts = Hosts()
hosts.add(Link()).start(["sleep", "5678"], log=Path(sys.argv[1]))
print("up", flush=True)
input()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == b"up\n"
    owned = psutil.Process(owner.pid).children(recursive=True)
    assert len(owned) >= 5, "two namespaces of two processes each, and a wire"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    _, alive = psutil.wait_procs(owned, timeout=10)
    assert not alive
    assert _sleepers("5678") == 0


def _sleepers(word: str) -> int:
    return sum(
        p.info["cmdline"] == ["sleep", word] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] is not None
    )
