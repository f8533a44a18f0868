"""The sidecar and the engines that a verification runs on, started for it and ended with it.

Owns their lifetime, and the wiring of the operator's socket into `loadtest.verify`. Invariant: all workers have one
compatibility key, or nothing is begun. It shows nothing.
"""

import asyncio
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from ..loadtest.harness import SidecarProcess
from ..loadtest.verify import record
from ..loadtest.verify.runs import ANSWER_S, Runner
from ..loadtest.verify.verification import Event, Options, Verification
from ..session.errors import EngineError
from .control_client import ControlClient

START_S = 1800.0
# Snapshots are taken when they are asked for: one that came by itself would replace a planted one. And many kills in a
# row are what is wanted here.
SETTINGS: Mapping[str, object] = {"store.snapshot_every_s": 86_400, "supervise.restarts_window_s": 0.001}


@dataclass(frozen=True, slots=True)
class Engines:
    """What is verified: a command that starts a worker, with what its environment needs, or workers that run."""

    command: tuple[str, ...]
    beside: tuple[str, ...]
    state_dir: Path | None
    settings: dict[str, object]
    environ: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """A sidecar, its engines and a runner on them, for as long as the context lasts."""

    def __init__(self, engines: Engines, *, workers: int = 2, isolate: bool = True) -> None:
        self._engines = engines
        self._isolate = isolate
        self._workers = workers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Bench":
        try:
            return await self._open()
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self) -> "Bench":
        self.store = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-verify-")))
        self.sidecar = SidecarProcess(
            self._engines.command,
            workers=self._workers,
            environ=self._engines.environ,
            settings=self._engines.settings,
            store=self.store,
            beside=self._engines.beside,
            state_dir=self._engines.state_dir,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        self._stack.push_async_callback(asyncio.to_thread, self.sidecar.stop)
        await self.sidecar.start(http, timeout_s=START_S)
        self.key = await self._common_key(http)
        models = await self.sidecar.ask(http, "/v1/models")
        try:
            self.model = str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"the engine lists no model: /v1/models answered {str(models)[:200]}") from None
        control = await self._stack.enter_async_context(ControlClient(self.sidecar.state_dir))
        self.runner = Runner(self.sidecar, http, control, self.model, isolate=self._isolate)
        return self

    async def _common_key(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        keys: dict[str, dict[str, Any]] = {w["name"]: w["key"] or {} for w in await self.sidecar.workers(http)}
        if without := sorted(name for name, key in keys.items() if not key):
            raise EngineError(
                f"{', '.join(without)} said nothing of its compatibility key: the plugin does not run there, so no "
                f"session could go on exactly; see `midstream doctor`\n{self.sidecar.last_lines(5)}"
            )
        first = next(iter(keys.values()))
        for name, key in keys.items():
            if changed := record.changes(first, key):
                raise EngineError(
                    f"{name} has another key ({', '.join(changed)}): sessions could not go on there exactly"
                )
        return dict(first)


async def verify(engines: Engines, options: Options, tell: Callable[[Event], None], *, isolate: bool) -> dict[str, Any]:
    """Carry out a verification and return its record. EngineError when nothing could be begun."""
    began_s = time.monotonic()
    async with Bench(engines, isolate=isolate) as bench:
        work = Verification(bench.runner, bench.store, int(bench.key["block_tokens"]), options, tell)
        found = await work.run()
        identity = _identity(bench, engines)
    told = record.record(found, options, identity, time.monotonic() - began_s)
    told["settings"]["prefix_cache"] = "isolated" if isolate else "shared"
    return told


async def check(engines: Engines, told: Mapping[str, Any]) -> record.Check:
    """Whether a record holds for what these engines are."""
    async with Bench(engines, workers=1) as bench:
        return record.check(told, bench.key, metadata.version("midstream"))


def _identity(bench: Bench, engines: Engines) -> record.Identity:
    return record.Identity(
        key=bench.key,
        model=bench.model,
        midstream=metadata.version("midstream"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        host={"platform": platform.platform(), "python": platform.python_version()},
        command=engines.command or engines.beside,
    )
