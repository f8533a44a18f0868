"""Real sidecars and gateways with leases at a real etcd, before one scripted engine that has no plugin."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from .etcd_server import EtcdServer

LEASE_S = 3
_START_S = 40.0


@dataclass(slots=True)
class Stream:
    """What a client had of a stream, and when."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: bool = False
    broken: bool = False
    status: int = 0

    @property
    def raw(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def token_count(self) -> int:
        """How many tokens there are."""
        return self.raw.count(b'"token_ids":[') - self.raw.count(b'"token_ids":[]')

    def tokens_s(self) -> list[float]:
        """When something with tokens came."""
        return [at_s for at_s, piece in self.pieces if b'"choices"' in piece]

    def longest_gap_s(self) -> float:
        """Between two pieces with tokens."""
        times = self.tokens_s()
        return max((b - a for a, b in pairwise(times)), default=0.0)


def end_holders(folder: Path) -> None:
    """End those of sidecars that were killed: they would stay for ten minutes."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "midstream.sidecar.holder" in words and any(word.startswith(f"{folder}/") for word in words):
            process.kill()


class LeasedFleet:
    """Processes of one fleet, by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etcd = EtcdServer(folder).start()
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}
        with (folder / "engine").open("wb") as out:
            argv = [sys.executable, "-m", "midstream.loadtest.proxy_bench_engine"]
            self.processes["engine"] = subprocess.Popen(argv, stdout=out)
        self.engine = self._read("engine", "http://")

    def node(self, name: str, settings: Mapping[str, object] | None = None, *, etcd: str = "") -> None:
        """Start a node before the engine."""
        place = ["--state-dir", str(self.folder / f"s-{name}"), "--worker", f"w={self.engine}"]
        self._spawn(name, "serve", *place, *self._sets(name, settings or {}, etcd))

    def gateway(self, name: str, settings: Mapping[str, object] | None = None, *, etcd: str = "") -> None:
        """Start a gateway."""
        self._spawn(name, "gateway", *self._sets(name, settings or {}, etcd))

    def _sets(self, name: str, settings: Mapping[str, object], etcd: str) -> list[str]:
        made: dict[str, object] = {
            "fleet.coordination": "etcd", "fleet.etcd_endpoints": etcd or self.etcd.url, "fleet.name": name,
            "fleet.secret_file": self.secret, "fleet.lease_s": LEASE_S,
        }  # fmt: skip
        words = [word for key, value in {**made, **settings}.items() for word in ("--set", f"{key}={value}")]
        return [*words, "--port", "0"]

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / name).open("ab") as log:
            argv = [sys.executable, "-m", "midstream.sidecar.cli", *words]
            self.processes[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def listening(self, *names: str) -> None:
        """Until these say where."""
        for name in names:
            self.urls[name] = self._read(name, "event=listening url=").split("event=listening url=")[1].split()[0]

    def _read(self, name: str, sign: str) -> str:
        deadline_s = time.monotonic() + _START_S
        while True:
            found = [line for line in self.log(name).splitlines() if sign in line]
            if found:
                return found[-1]
            assert time.monotonic() < deadline_s, self.log(name)
            time.sleep(0.02)

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.folder / name).read_text()

    def signal(self, name: str, number: signal.Signals) -> None:
        """To one of the processes."""
        os.kill(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for it."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        """End all of it."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
        self.etcd.kill()
        end_holders(self.folder)

    # ---- clients

    async def stream(self, http: aiohttp.ClientSession, name: str, **fields: Any) -> Stream:
        """A stream from one of them, to its end, whatever that is."""
        got = Stream()
        await self.read(http, name, got, **fields)
        return got

    async def read(self, http: aiohttp.ClientSession, name: str, got: Stream, **fields: Any) -> None:
        """The same, for who looks while it goes on."""
        body = {"model": "bench", "prompt": "x", "temperature": 0, "stream": True, "return_token_ids": True}
        asked = {**body, "max_tokens": 40, "bench_gap_s": 0.02, **fields}
        try:
            async with http.post(f"{self.urls[name]}/v1/completions", json=asked) as answer:
                got.status = answer.status
                while piece := await answer.content.readany():
                    got.pieces.append((time.monotonic(), piece))
                got.ended = True
        except (aiohttp.ClientPayloadError, ConnectionError):
            got.broken = True

    async def serving(self, http: aiohttp.ClientSession, name: str, limit_s: float = 30.0) -> None:
        """Until it answers a request."""
        async with asyncio.timeout(limit_s):
            while (await self.stream(http, name, max_tokens=1)).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
