"""Engines that are started by hand beside a sidecar, or alone: the way an operator does it, and again after a kill.

Owns their processes and logs. Started beside a sidecar they outlive it, so that one start of an engine, which is what
costs time on a GPU, serves several sidecars with other settings. Invariant: after `stop` nothing of an engine is left.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil

from ...session.errors import EngineError
from ...session.ports import free_port
from ..harness import end_tree
from .kinds import VLLM, EngineKind
from .models import SERVED_AS

LOOK_S = 0.1
LOG_LINES = 60


class Engine:
    """One engine. With `state_dir` it has midstream's plugin and is the worker `name` there; else it is alone."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        state_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        kind: EngineKind = VLLM,
    ) -> None:
        self.name = name
        self.kind = kind
        self.port = free_port()
        self.log = folder / f"engine-{name}.log"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        # A place that this process itself has found is not the engine's.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
        self._environ = {**inherited, **kind.environ, **(environ or {})}
        if state_dir is not None:
            self._command += kind.beside
            place = {"MIDSTREAM_STATE_DIR": str(state_dir), "MIDSTREAM_WORKER": name}
            self._environ |= {**(kind.beside_environ or {}), **place}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        # How long its present start took, once it is known.
        self.ready_after_s: float | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and do not wait."""
        print(f"engine {self.name}: starting, log {self.log}", flush=True)
        self._started_s, self.ready_after_s = time.monotonic(), None
        with self.log.open("ab") as sink:
            # In the group of this process: where that is killed from outside, no engine is left on the card.
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=sink, stderr=sink)

    async def wait_ready(self, http: aiohttp.ClientSession, *, timeout_s: float) -> float:
        """Wait until it answers; returns how long it took from its start. EngineError shows the end of its log."""
        deadline_s = time.monotonic() + timeout_s
        while not await self._is_healthy(http):
            if self._process is None or self._process.poll() is not None:
                raise EngineError(f"engine {self.name} has ended:\n{self.last_lines()}")
            if time.monotonic() > deadline_s:
                raise EngineError(f"engine {self.name} is not ready after {timeout_s:.0f} s:\n{self.last_lines()}")
            await asyncio.sleep(LOOK_S)
        if self.ready_after_s is None:
            self.ready_after_s = time.monotonic() - self._started_s
            print(f"engine {self.name}: ready after {self.ready_after_s:.1f} s", flush=True)
        return self.ready_after_s

    async def _is_healthy(self, http: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(5)) as answer:
                return answer.status == 200
        return False

    async def warm_up(self, http: aiohttp.ClientSession, *, streams: int = 4) -> None:
        """Some first requests, which are of another kind than all later ones."""
        body = {"model": SERVED_AS, "prompt": list(range(200, 400)), "max_tokens": 8, "temperature": 0}

        async def one() -> None:
            async with http.post(f"{self.url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    told = (await answer.text())[:300]
                    raise EngineError(f"engine {self.name} answers {answer.status}: {told}\n{self.last_lines()}")

        for _ in range(2):
            await asyncio.gather(*(one() for _ in range(streams)))

    def core(self) -> psutil.Process:
        """The process of its core. EngineError where there is none that lives."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    if lives(child) and any(self.kind.core in word for word in (child.name(), *child.cmdline())):
                        return child
        raise EngineError(f"engine {self.name} has no core; its log ends:\n{self.last_lines()}")

    async def ended(self, *, timeout_s: float = 30.0) -> None:
        """Wait until its processes have gone after its core was killed; what hangs is killed."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, timeout_s)
        await asyncio.to_thread(self.stop)

    def last_lines(self, count: int = LOG_LINES) -> str:
        """The end of its log."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        return "(no log)"

    def stop(self) -> None:
        """End all of its processes."""
        if self._process is None:
            return
        end_tree(self._process, 20)
        self._process = None


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that its parent has not collected does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
