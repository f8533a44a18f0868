"""`midstream drain` and the socket that it asks by: what an operator orders, takes back, and is shown."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from midstream.proxy.settings import ProxySettings
from midstream.session.errors import ConfigError, EngineError, Refused
from midstream.sidecar import cli_drain
from midstream.sidecar.control import Control, serving_control
from midstream.sidecar.control_client import ControlClient
from midstream.sidecar.drain.drains import Drains
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.node import NodeDrain
from midstream.sidecar.drain.worker import WorkerDrain
from support.coordinating import Rig, asked, running


class Served:
    """A sidecar's control socket over a rig with one session; `over` is its own drain's end."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.folder = folder
        here = Here(rig.workers, rig.coordinator, lambda pool: None, 8)

        async def end() -> None:
            return

        def of_worker(name: str) -> WorkerDrain | None:
            if name not in {worker.name for worker in rig.workers.all()}:
                return None
            worker = rig.workers.get(name)
            return WorkerDrain(worker, here, rig.coordinator, rig.metrics, at_once=2, short_s=0, end=end)

        self.drains = Drains(NodeDrain(rig.coordinator), of_worker, lambda name: None, within_s=30)
        self.over = asyncio.create_task(self.drains.node.over())

    async def drain(self, **options: Any) -> int:
        """The command, in a process's place."""
        return await asyncio.to_thread(cli_drain.drain, state_dir=str(self.folder), **options)


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    rig = Rig(tmp_path)
    await running(rig, 10, 20)
    made = Served(rig, folder)
    async with serving_control(folder, Control(rig.coordinator, ProxySettings(), made.drains)):
        yield made
    made.over.cancel()
    await asyncio.gather(made.over, return_exceptions=True)
    await made.drains.close()


async def test_a_drain_is_shown_until_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(tmp_path) as sidecar:
        draining = asyncio.create_task(sidecar.drain(deadline=60.0))
        async with asyncio.timeout(10):
            while not sidecar.rig.coordinator.draining:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        sidecar.rig.coordinator.ended(asked(), "finished")
        assert await draining == 0
        await sidecar.over
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("draining: 1 session, ")
        assert shown[-1] == "over: 0 sessions"


async def test_a_drain_that_ends_with_sessions_says_so_by_its_status(tmp_path: Path) -> None:
    async with served(tmp_path) as sidecar:
        assert await sidecar.drain(deadline=0.2) == 1
        await sidecar.over


async def test_who_waits_for_a_drain_that_is_cancelled_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as sidecar:
        draining = asyncio.create_task(sidecar.drain())
        async with asyncio.timeout(10):
            while not sidecar.rig.coordinator.draining:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await sidecar.drain(cancel=True) == 0
        assert not sidecar.rig.coordinator.draining
        assert await draining == 1
        with pytest.raises(Refused, match="not being drained"):
            await sidecar.drain(cancel=True)


async def test_a_worker_is_named_or_it_is_said_that_there_is_none(tmp_path: Path) -> None:
    async with served(tmp_path) as sidecar:
        assert await sidecar.drain(worker="w0", wait=False) == 0
        assert sidecar.rig.workers.get("w0").leaving
        assert sidecar.drains.told()["workers"]["w0"]["phase"] == "draining"
        assert sidecar.drains.left() == 1
        assert not sidecar.rig.coordinator.draining
        assert await sidecar.drain(worker="w0", cancel=True) == 0
        with pytest.raises(Refused, match="no worker 'w9'"):
            await sidecar.drain(worker="w9")


async def test_orders_that_make_no_sense_are_refused_in_words(tmp_path: Path) -> None:
    async with served(tmp_path) as sidecar, ControlClient(sidecar.folder) as control:
        with pytest.raises(Refused, match="give 0 to"):
            await control.drain(deadline_s=-1)
        with pytest.raises(ConfigError, match="--deadline"):
            await sidecar.drain(cancel=True, deadline=3.0)
        assert (await control.drains())["phase"] == "serving"
    with pytest.raises(EngineError, match="no sidecar answers"):
        await sidecar.drain()
