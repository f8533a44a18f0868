"""Brings that hang: whom they hold up, and whom they do not."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer
from contracts.store_suite import OTHER, SESSION, snapshot_of, write

from midstream.session.disk_store import DiskStore
from midstream.session.ids import SessionId
from midstream.sidecar.replicas.bringer import Bringer, Brought
from midstream.sidecar.replicas.budget import Budget
from midstream.sidecar.replicas.contract import ReplicaStore
from midstream.sidecar.replicas.local_server import BRINGS_MAX, LocalServer
from midstream.sidecar.replicas.memory_objects import MemoryObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.peer_wire import BASE
from midstream.sidecar.replicas.process import OwnStore
from midstream.sidecar.replicas.remotes import Remote


class Slow(MemoryObjects):
    """Takes nothing before it may."""

    def __init__(self, may: threading.Event) -> None:
        super().__init__()
        self.may = may

    def put(self, name: str, content: bytes) -> None:
        self.may.wait(20)
        super().put(name, content)


def test_a_peer_that_hangs_holds_up_nothing_that_is_brought_to_another(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "store")
    write(disk, range(8))
    write(disk, range(8, 16), session=OTHER)
    may = threading.Event()

    def opened(remote: Remote) -> ReplicaStore:
        objects = Slow(may) if "hangs" in remote.place else MemoryObjects()
        return ObjectStore(objects, Names("", "peer"), bytes_max=1 << 30)

    bringer = Bringer(opened, OwnStore(tmp_path / "store"), Budget(10**12))
    with ThreadPoolExecutor(3) as threads:
        hanging = [threads.submit(bringer.bring, session, "peer://hangs:1") for session in (SESSION, OTHER)]
        try:
            began_s = time.monotonic()
            threads.submit(bringer.bring, SESSION, "peer://well:1").result(5)
            assert time.monotonic() - began_s < 2
            assert not any(future.done() for future in hanging)
        finally:
            may.set()
        for future in hanging:
            future.result(5)
    bringer.close()
    disk.close()


class Nodes:
    """The local server, of which brings take as long as a test wants."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = 0
        self.server = LocalServer(cast(Any, self), dict, dict, self.bring, lambda _: None)

    def latest(self, session: SessionId) -> Any:
        return snapshot_of(("0" * 32,), session)

    def bring(self, session: SessionId, to: str) -> Brought:
        self.begun += 1
        self.may_end.wait(20)
        return Brought(1, 1, 0, 0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def nodes() -> Any:
    made = Nodes()
    yield made
    made.may_end.set()


async def test_whoever_restores_waits_for_no_bring_however_many_there_are(nodes: Nodes) -> None:
    async with TestClient(TestServer(nodes.server.app())) as client:

        async def bring() -> int:
            async with client.post(f"{BASE}/bring/{SESSION}", json={"to": "peer://a:1"}) as answer:
                return answer.status

        bringing = [asyncio.create_task(bring()) for _ in range(60)]
        # What is too much is told so at once.
        await until(lambda: sum(task.done() for task in bringing) == 60 - BRINGS_MAX)
        async with asyncio.timeout(2), client.get(f"{BASE}/latest/{SESSION}") as answer:
            assert answer.status == 200
        nodes.may_end.set()
        statuses = await asyncio.gather(*bringing)
        assert statuses.count(200) == BRINGS_MAX
        assert set(statuses) == {200, 503}


async def test_a_bring_that_nobody_waits_for_any_more_counts_until_it_is_done(nodes: Nodes) -> None:
    bringers = nodes.server._bringers
    leaving = [asyncio.create_task(bringers.run(lambda: nodes.bring(SESSION, ""))) for _ in range(BRINGS_MAX)]
    await until(lambda: nodes.begun > 0)
    begun = nodes.begun
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    # Those that had not begun are not begun any more; the others hold their threads.
    assert bringers._under_way == begun
    nodes.may_end.set()
    await until(lambda: bringers._under_way == 0)
    assert nodes.begun == begun
