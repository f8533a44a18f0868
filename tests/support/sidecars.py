"""Whole sidecars on the embedded engine and its tiny model, for tests: started as users start them, and taken apart.

Owns the words of these tests: *twins* are two copies of one request, which admission puts on two workers. So a kill of
one worker interrupts one copy of each, and the other copy says what the answer should have been.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from midstream.loadtest.aim import Target
from midstream.loadtest.client import Answer, read_stream, read_whole
from midstream.loadtest.harness import SidecarProcess, Victim, kill_worker
from midstream.session.arena import ArenaReader
from midstream.session.ticket import worker_dir

PYTHON_VARIABLE = "MIDSTREAM_TEST_TRANSFORMERS_PYTHON"
MODEL_VARIABLE = "MIDSTREAM_TEST_TINY_MODEL"
MODEL = "tiny"
BLOCK_TOKENS = 16
START_S = 90.0
REPORT = {"X-Midstream-Report": "1"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Kills in a row are what is wanted here: none of them is to be waited for longer than the first.
SETTINGS: dict[str, object] = {"supervise.restarts_window_s": 0.001, "proxy.stall_floor_s": 3.0}


def engine_command(python: str, model: str, *more: str) -> list[str]:
    """How one worker is started."""
    module = "midstream.adapters.transformers.server"
    return [python, "-m", module, "--model", model, "--served-model-name", MODEL, "--threads", "1", *more]


class Sidecar:
    """A running sidecar, and what tests do with it."""

    def __init__(self, command: Sequence[str], *, workers: int = 2, **options: Any) -> None:
        settings = {**SETTINGS, **options.pop("settings", {})}
        self.process = SidecarProcess(command, workers=workers, settings=settings, **options)

    def start(self) -> "Sidecar":
        """Start it from outside of any event loop, and wait until it is ready."""
        asyncio.run(self._start())
        return self

    async def _start(self) -> None:
        async with aiohttp.ClientSession() as http:
            try:
                await self.process.start(http, timeout_s=START_S)
            except BaseException:
                await asyncio.to_thread(self.stop)
                raise

    def stop(self) -> None:
        """End it and everything that belongs to it."""
        self.process.stop()

    @property
    def url(self) -> str:
        """Its base URL."""
        return self.process.url

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process.process is not None
        return self.process.process.pid

    # ---- requests

    async def stream(
        self, http: aiohttp.ClientSession, body: dict[str, Any], on_tokens: Callable[[Answer], Any] | None = None
    ) -> Answer:
        """Stream an answer with its report."""
        path = CHAT if "messages" in body else COMPLETIONS
        asked = {"model": MODEL, **body}
        return await read_stream(http, self.url + path, asked, headers=REPORT, on_tokens=on_tokens)

    async def whole(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
        """An answer in one piece."""
        return await read_whole(http, self.url + COMPLETIONS, {"model": MODEL, **body})

    # ---- looks

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """`midstream status`."""
        return await self.process.ask(http, "/midstream/v1/status")

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until all workers are ready and no session is left."""
        await until(self._idle, http)
        await self.process.wait_ready(http, timeout_s=START_S)

    async def _idle(self, http: aiohttp.ClientSession) -> bool:
        return bool((await self.status(http)).get("sessions_open") == 0)

    async def sessions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """All sessions, newest last."""
        return await self.process.sessions(http)

    async def worker(self, http: aiohttp.ClientSession, name: str = "worker-0") -> dict[str, Any]:
        """A worker as `midstream status` shows it."""
        return next(w for w in await self.process.workers(http) if w["name"] == name)

    async def target(self, http: aiohttp.ClientSession, name: str = "worker-0") -> Target:
        """A worker to aim at."""
        worker = await self.worker(http, name)
        return Target(name, worker["pid"], self.arena_path(worker))

    def arena_path(self, worker: dict[str, Any]) -> Path:
        """The arena of a worker's epoch."""
        return worker_dir(self.process.state_dir, worker["name"]) / f"{worker['epoch']}.arena"

    def arena(self, worker: dict[str, Any]) -> ArenaReader:
        """Its reader; the caller closes it."""
        return ArenaReader(self.arena_path(worker))

    async def metric(self, http: aiohttp.ClientSession, name: str) -> float:
        """The sum of a metric over its labels."""
        async with http.get(self.url + "/metrics") as answer:
            text = await answer.text()
        return sum(float(m[1]) for m in re.finditer(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    # ---- harm

    async def kill(self, http: aiohttp.ClientSession, name: str = "worker-0") -> None:
        """SIGKILL a worker."""
        kill_worker((await self.worker(http, name))["pid"], Victim.TREE)

    def engines(self) -> list[psutil.Process]:
        """All engine processes of this sidecar that live, whoever their parent is now."""
        return [p for p in self._own() if "midstream.adapters.transformers.server" in p.info["cmdline"]]

    def holders(self) -> list[psutil.Process]:
        """Its holders that live."""
        return [p for p in self._own() if "midstream.sidecar.holder" in p.info["cmdline"]]

    def _own(self) -> list[psutil.Process]:
        mark = str(self.process.folder)
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            if process.info["status"] == psutil.STATUS_ZOMBIE or not process.info["cmdline"]:
                continue
            try:
                environ = process.environ().get("MIDSTREAM_HOLDER", "")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if mark in environ or any(mark in word for word in process.info["cmdline"]):
                found.append(process)
        return found


@contextmanager
def sidecars_started(command: Sequence[str]) -> Iterator[Callable[..., Sidecar]]:
    """A way to start sidecars, all of which are stopped at the end; options are those of `Sidecar`."""
    started: list[Sidecar] = []

    def start(**options: Any) -> Sidecar:
        started.append(Sidecar(**{"command": command, **options}))
        return started[-1].start()

    yield start
    for sidecar in started:
        sidecar.stop()


async def until(
    condition: Callable[[aiohttp.ClientSession], Awaitable[bool]], http: aiohttp.ClientSession, limit_s: float = 30.0
) -> float:
    """Wait until something holds, and return how long that took."""
    began_s = time.monotonic()
    while not await condition(http):
        assert time.monotonic() < began_s + limit_s, f"{condition} did not come true within {limit_s:g} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


def stop_process(pid: int) -> None:
    """SIGSTOP: alive, and says nothing."""
    os.kill(pid, signal.SIGSTOP)


def outcome_of(answer: Answer) -> tuple[str, int]:
    """What the trailer told: the outcome and the number of takeovers."""
    found = re.fullmatch(r"midstream outcome=(\w+) takeovers=(\d+) gap_ms=[\d.]+", answer.report)
    assert found is not None, answer.report
    return found[1], int(found[2])


def require_whole(*answers: Answer) -> None:
    """Each answer ended well."""
    for answer in answers:
        assert answer.whole, (answer.error, answer.violations, answer.finish, answer.text[-40:])
