"""What an engine needs beside it when there is no sidecar: a holder, a mover, arenas. Engines start by their adapters.

Owns the processes; nothing here knows one engine from another.
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.adapters.contract import Beside, EngineAdapter
from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.arena import ArenaReader, Slot, create_arena
from midstream.session.ids import SessionId
from midstream.session.ports import free_port
from midstream.sidecar import plugin_path
from support.mover_rig import Processes


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """An engine for the contract suite.

    `argv` is its command without a port, `env` what its environment needs beside ours, `streams` how many sessions run
    at once where answers are compared (1 for an engine whose answers depend on the batch).
    """

    adapter: EngineAdapter
    argv: tuple[str, ...]
    env: Mapping[str, str]
    model: str
    block_tokens: int
    streams: int = 1
    start_s: float = 120.0


@dataclass(slots=True)
class Running:
    """One engine process with its arena."""

    process: "subprocess.Popen[bytes]"
    url: str
    arena: Path | None
    log: Path

    def slot(self, session: SessionId, generation: int | None = None) -> tuple[Slot | None, list[int], list[int]]:
        """What the arena says of a session: record, journal, blocks."""
        assert self.arena is not None
        with closing(ArenaReader(self.arena)) as reader:
            slot = reader.find(session, generation)
            if slot is None:
                return None, [], []
            return slot, reader.journal(slot), list(reader.table(slot).blocks)

    def facts(self) -> dict[str, Any]:
        """What the engine published."""
        assert self.arena is not None
        with closing(ArenaReader(self.arena)) as reader:
            facts = reader.facts()
        assert facts is not None, "a ready engine has published its facts"
        return facts

    def kill(self) -> None:
        """SIGKILL its whole tree."""
        if self.process.poll() is None:
            kill_worker(self.process.pid, Victim.TREE)
        self.process.wait(20)

    def wait_ready(self, path: str, limit_s: float) -> None:
        """Wait until it answers its health check; AssertionError with the log's end when it does not."""
        deadline_s = time.monotonic() + limit_s
        while not self._answers(path):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"it did not come up:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class BesideEngines:
    """A folder with a holder and a mover, beside which engines are started."""

    def __init__(self, folder: Path, engine: EngineUnderTest) -> None:
        self._folder = folder
        self._engine = engine
        self._running: list[Running] = []
        self._processes = Processes(folder)
        self.holder = self._processes.start_holder()
        self._processes.start_mover()

    @property
    def mover_socket(self) -> Path:
        """Where the mover listens."""
        return self._processes.mover_path

    def start(self, worker: str, *, epoch: int = 1, adopt: Path | None = None, with_arena: bool = True) -> Running:
        """Start an engine; call `ready` before use."""
        arena = self._folder / f"{worker}.{epoch}.arena" if with_arena else None
        if arena is not None:
            create_arena(arena, slot_count=64, page_count=1024)
        port = free_port()
        plugin = plugin_path.ensure(self._folder)
        beside = Beside(worker, epoch, self._processes.holder_path, arena, adopt, 5.0, plugin)
        launch = self._engine.adapter.start(self._engine.argv, port, beside, {**os.environ, **self._engine.env})
        log = self._folder / f"{worker}.{epoch}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                launch.argv, env=dict(launch.env), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        running = Running(process, f"http://127.0.0.1:{port}", arena, log)
        self._running.append(running)
        return running

    def ready(self, *engines: Running) -> None:
        """Wait until all of them serve."""
        for running in engines:
            running.wait_ready(self._engine.adapter.health().path, self._engine.start_s)

    def close(self) -> None:
        """End everything."""
        for running in self._running:
            running.kill()
        self._processes.stop()
