"""Engines beside a state folder, and one sidecar after another in front of them.

Owns the order in which they come: a sidecar first, which offers places, then the engines; later sidecars find them
where they are. Invariant: what was started is ended, whatever fails, and the logs of all sidecars are kept.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from ...session.errors import EngineError
from ..harness import SidecarProcess
from .engines import Engine
from .kinds import VLLM, EngineKind

LOOK_S = 0.02
QUIET_S = 60.0
BACK_S = 300.0


class Fleet:
    """Some engines and the sidecar that is in front of them now."""

    def __init__(self, folder: Path, http: aiohttp.ClientSession) -> None:
        self._folder = folder
        self._http = http
        memory = Path("/dev/shm")
        # Arenas belong in memory; the folder's name must be short, for sockets lie in it.
        self._place = Path(tempfile.mkdtemp(prefix="midstream-", dir=memory if memory.is_dir() else None))
        self.state_dir = self._place / "state"
        self.engines: dict[str, Engine] = {}
        self.sidecar: SidecarProcess | None = None
        self._last: SidecarProcess | None = None
        self._sidecar_count = 0
        self._coming: dict[str, asyncio.Task[float]] = {}

    def add(
        self,
        name: str,
        command: Sequence[str],
        *,
        alone: bool = False,
        environ: Mapping[str, str] | None = None,
        kind: EngineKind = VLLM,
    ) -> Engine:
        """One more engine, which is not started yet; `alone`: without midstream."""
        state_dir = None if alone else self.state_dir
        engine = Engine(name, command, self._folder, state_dir=state_dir, environ=environ, kind=kind)
        self.engines[name] = engine
        return engine

    async def front(
        self, names: Sequence[str], *, settings: Mapping[str, object] | None = None, store: Path | None = None
    ) -> SidecarProcess:
        """A new sidecar in front of these engines, in place of the one before; it does not wait for them."""
        await self.end_sidecar()
        self._sidecar_count += 1
        beside = [f"{name}={self.engines[name].url}" for name in names]
        self.sidecar = SidecarProcess([], beside=beside, state_dir=self.state_dir, settings=settings, store=store)
        self._last = self.sidecar
        print(f"sidecar {self._sidecar_count}: {dict(settings or {})} store={store}", flush=True)
        self._starting = asyncio.create_task(self.sidecar.start(self._http, timeout_s=600.0))
        # Its places are offered before it says that it listens.
        deadline_s = time.monotonic() + 30.0
        while not all((self.state_dir / "workers" / name / "ticket.json").exists() for name in names):
            if self._starting.done():
                break
            if time.monotonic() > deadline_s:
                raise EngineError(f"the sidecar offers no places:\n{self.sidecar.last_lines()}")
            await asyncio.sleep(LOOK_S)
        return self.sidecar

    async def ready(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Wait until these engines answer, and the sidecar calls all of its own ready."""
        for name in names:
            if (coming := self._coming.pop(name, None)) is not None:
                await coming
            await self.engines[name].wait_ready(self._http, timeout_s=timeout_s)
        if self.sidecar is not None:
            await self._starting
            await self.sidecar.wait_ready(self._http, timeout_s=60.0)

    async def worker(self, name: str) -> dict[str, Any]:
        """What the sidecar tells of a worker."""
        assert self.sidecar is not None
        for worker in await self.sidecar.workers(self._http):
            if worker["name"] == name:
                return worker
        raise EngineError(f"the sidecar knows no worker {name}:\n{self.sidecar.last_lines()}")

    async def quiet(self, name: str) -> None:
        """Wait until a worker has no session."""
        deadline_s = time.monotonic() + QUIET_S
        while (await self.worker(name))["sessions"]:
            if time.monotonic() > deadline_s:
                raise EngineError(f"worker {name} still has sessions after {QUIET_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def begin_again(self, name: str) -> None:
        """Start an engine anew whose core was killed; when it is ready is looked at beside whatever comes next."""
        engine = self.engines[name]
        await engine.ended()
        engine.start()
        self._coming[name] = asyncio.create_task(engine.wait_ready(self._http, timeout_s=BACK_S))

    async def end_sidecar(self) -> None:
        """End the sidecar in front, if there is one; its log stays."""
        sidecar, self.sidecar = self.sidecar, None
        if sidecar is None:
            return
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if sidecar.log.exists():
            shutil.copy(sidecar.log, self._folder / f"sidecar-{self._sidecar_count}.log")
        await asyncio.to_thread(sidecar.stop)

    async def end(self) -> None:
        """End everything."""
        for coming in self._coming.values():
            coming.cancel()
        await asyncio.gather(*self._coming.values(), return_exceptions=True)
        await self.end_sidecar()
        for engine in self.engines.values():
            await asyncio.to_thread(engine.stop)
        if self._last is not None:
            # It outlives sidecars. The engines are gone, so what it keeps is nobody's, and would fill the card.
            await asyncio.to_thread(self._last.kill_holder)
        shutil.rmtree(self._place, ignore_errors=True)

    def describe(self) -> str:
        """The ends of all logs, for an error."""
        parts = [f"--- engine {name}\n{engine.last_lines()}" for name, engine in self.engines.items()]
        if self.sidecar is not None:
            parts.append(f"--- sidecar\n{self.sidecar.last_lines()}")
        return "\n".join(parts)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """A fleet whose logs lie in `folder`. It is ended whatever happens; an error shows the ends of all logs first."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=300.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        one = Fleet(folder, http)
        try:
            yield one
        except (Exception, asyncio.CancelledError):
            print(one.describe(), flush=True)
            raise
        finally:
            await one.end()


def kill_core(engine: Engine) -> psutil.Process:
    """SIGKILL an engine's core; returns the process that was killed."""
    core = engine.core()
    core.kill()
    return core
