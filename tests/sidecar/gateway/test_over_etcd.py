"""A gateway that takes its nodes from a real etcd: real sidecars before a scripted engine, which has no plugin.

Nobody is named and nobody is polled: leases alone say who is there.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.etcd_server import EtcdServer, binary

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="MIDSTREAM_TEST_ETCD names no etcd"),
    pytest.mark.timeout(90),
]
BODY = {"model": "bench", "prompt": "x", "temperature": 0, "stream": True, "max_tokens": 40, "bench_gap_s": 0.02}


class Fleet:
    """Two nodes, a gateway, and the etcd between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etcd = EtcdServer(folder).start()
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def start(self) -> None:
        """Start all of it."""
        with (self.folder / "engine").open("wb") as out:
            argv = [sys.executable, "-m", "midstream.loadtest.proxy_bench_engine"]
            self.processes["engine"] = subprocess.Popen(argv, stdout=out)
        common = [
            "--set", "fleet.coordination=etcd", "--set", f"fleet.etcd_endpoints={self.etcd.url}",
            "--set", f"fleet.secret_file={self.secret}", "--set", "fleet.lease_s=3", "--port", "0",
        ]  # fmt: skip
        engine = self._read("engine", "http://")
        for name in ("a", "b"):
            # One engine is as good as two where nothing is lost but nodes.
            place = ["--state-dir", str(self.folder / f"state-{name}"), "--set", f"fleet.name={name}"]
            self._spawn(name, "serve", *common, *place, "--worker", f"w={engine}")
        self._spawn("gateway", "gateway", *common)
        line = self._read("gateway", "event=listening url=")
        self.url = line.split("event=listening url=")[1].split()[0]

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / name).open("wb") as log:
            argv = [sys.executable, "-m", "midstream.sidecar.cli", *words]
            self.processes[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def _read(self, name: str, sign: str) -> str:
        deadline_s = time.monotonic() + 30
        while True:
            found = [line for line in (self.folder / name).read_text().splitlines() if sign in line]
            if found:
                return found[0]
            assert time.monotonic() < deadline_s, (self.folder / name).read_text()
            time.sleep(0.02)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To one of the processes."""
        os.kill(self.processes[name].pid, number)

    def stop(self) -> None:
        """End all of it."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
        self.etcd.kill()

    async def ready(self, http: aiohttp.ClientSession) -> list[str]:
        """Names of the nodes that are ready for the gateway, by their ids."""
        async with http.get(f"{self.url}/midstream/v1/status") as answer:
            nodes = (await answer.json())["nodes"]
        return sorted(node["name"] for node in nodes if node["readiness"] == "ready")

    async def until_ready(self, http: aiohttp.ClientSession, *names: str, limit_s: float = 20) -> list[str]:
        """Wait until just these are."""
        async with asyncio.timeout(limit_s):
            while True:
                ready = await self.ready(http)
                if [one.partition(".")[0] for one in ready] == sorted(names):
                    return ready
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Any:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


@pytest_asyncio.fixture
async def fleet(started: Fleet) -> AsyncIterator[tuple[Fleet, aiohttp.ClientSession]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
        await started.until_ready(http, "a", "b")
        yield started, http


async def test_a_node_that_hangs_is_lost_with_its_lease_and_is_another_member_when_it_wakes(
    fleet: tuple[Fleet, aiohttp.ClientSession],
) -> None:
    nodes, http = fleet
    before = await nodes.ready(http)
    nodes.signal("a", signal.SIGSTOP)
    await nodes.until_ready(http, "b")
    async with http.post(f"{nodes.url}/v1/completions", json=BODY) as answer:
        assert (await answer.text()).count('"text"') == BODY["max_tokens"]
    nodes.signal("a", signal.SIGCONT)
    after = await nodes.until_ready(http, "a", "b")
    assert len(set(before) & set(after)) == 1


async def test_while_etcd_is_silent_sessions_begin_and_end_as_before(
    fleet: tuple[Fleet, aiohttp.ClientSession],
) -> None:
    nodes, http = fleet
    nodes.etcd.freeze()
    try:
        await asyncio.sleep(5)
        assert len(await nodes.ready(http)) == 2
        async with http.post(f"{nodes.url}/v1/completions", json=BODY) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    finally:
        nodes.etcd.thaw()
    await nodes.until_ready(http, "a", "b")


async def test_a_node_that_ends_says_so(fleet: tuple[Fleet, aiohttp.ClientSession]) -> None:
    nodes, http = fleet
    nodes.signal("b", signal.SIGTERM)
    # Long before its lease would be over.
    await nodes.until_ready(http, "a", limit_s=2)
