"""The ways that are compared: how each is started, and where its requests go.

`control` is the sidecar undisturbed: its answers are what all others are compared with, and beside `engine` it tells
what the sidecar costs.
"""

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import aiohttp
import psutil

from ...session.errors import EngineError
from ...session.ports import free_ports
from ..client import POLICY_HEADER, REPORT_HEADER
from ..harness import POLL_S
from .fault_plan import Plan
from .sender import Route


class Strategy(StrEnum):
    """Who brings an interrupted answer to its end, and from what."""

    CONTROL = "control"
    ENGINE = "engine"
    KV = "kv"
    RECOMPUTE = "recompute"
    RESTART = "restart"
    URL = "url"


FAULTY = (Strategy.KV, Strategy.RECOMPUTE, Strategy.RESTART)
CHOICES = (*FAULTY, Strategy.ENGINE)


def settings_of(strategy: Strategy, plan: Plan) -> dict[str, object]:
    """The sidecar's settings. Kills in a row are wanted here: none is to be waited for longer than the first."""
    settings: dict[str, object] = {"supervise.restarts_window_s": 0.001}
    if strategy is Strategy.RECOMPUTE:
        settings["restore.tiers"] = "none"
    if plan.arena is not None and strategy in FAULTY:
        settings["arena.slot_count"] = plan.arena.slot_count
        settings["arena.page_count"] = plan.arena.page_count
    return settings


def route_of(strategy: Strategy, urls: Sequence[str]) -> Route:
    """Where requests go."""
    if strategy is Strategy.RESTART:
        return Route(tuple(urls), {POLICY_HEADER: "off"}, client_restarts=True)
    return Route(tuple(urls), {} if strategy is Strategy.ENGINE else {REPORT_HEADER: "1"})


class Engines:
    """Engines alone, without a sidecar, each on a port of its own."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = list(command)
        self._ports = free_ports(count)
        self._folder = tempfile.TemporaryDirectory(prefix="midstream-engines-")
        self._environ = _environ(self._command, Path(self._folder.name))
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def urls(self) -> list[str]:
        """Their base URLs."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    async def start(self, http: aiohttp.ClientSession, *, timeout_s: float) -> None:
        """Start them all and wait until each is healthy. EngineError shows the last lines of one that is not."""
        for port in self._ports:
            argv = [*self._command, "--host", "127.0.0.1", "--port", str(port)]
            with self._log(port).open("ab") as sink:
                # Ended by `stop`.
                self._processes.append(
                    subprocess.Popen(argv, env=self._environ, stdout=sink, stderr=sink)  # noqa: ASYNC220
                )
        deadline_s = time.monotonic() + timeout_s
        for port, process in zip(self._ports, self._processes, strict=True):
            while not await _is_healthy(http, port):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    lines = self._log(port).read_text(errors="replace").splitlines()[-20:]
                    raise EngineError("the engine alone did not come up:\n" + "\n".join(lines))
                await asyncio.sleep(POLL_S)

    def _log(self, port: int) -> Path:
        return Path(self._folder.name) / f"{port}.log"

    def stop(self) -> None:
        """End all of their processes."""
        doomed: list[psutil.Process] = []
        for started in self._processes:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(started.pid)
                doomed += [root, *root.children(recursive=True)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self._processes:
            started.wait()
        self._folder.cleanup()


def _environ(command: Sequence[str], folder: Path) -> dict[str, str]:
    """Ours; midstream's own engine finds its package by a link, without the plugin's entry point beside it."""
    if not any(word.startswith("midstream.") for word in command):
        return dict(os.environ)
    (folder / "midstream").symlink_to(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder)}


async def _is_healthy(http: aiohttp.ClientSession, port: int) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError):
        async with http.get(f"http://127.0.0.1:{port}/health", timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status == 200
    return False
