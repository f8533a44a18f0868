"""A restore inside one process, where a test can hold it at any point."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstream.session.arena import ArenaReader, LoadState
from midstream.session.errors import StoreError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.session.store import Draft, StoredSnapshot, StoreFigures, Swept
from midstream.sidecar.mover import orders
from midstream.sidecar.mover.counters import Counters
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.device_calls import Faults
from midstream.sidecar.mover.host_pool import HostPool
from midstream.sidecar.mover.lineage import Lineage
from midstream.sidecar.mover.orders import Order
from midstream.sidecar.mover.pools import Copied, Copies, Pool
from midstream.sidecar.mover.protocol import MoverError, Reason
from midstream.sidecar.mover.restorer import Restorer
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.sums import Sums
from midstream.sidecar.mover.suspects import Suspects
from support.mover_rig import KEY, Processes, Worker, prompt_hash

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = [100, 101, 102]


class SlowStore:
    """A store with one snapshot whose chunks come only when they are let go."""

    def __init__(self, manifest: Manifest, raw: bytes) -> None:
        self.manifest = manifest
        self.raw = raw
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def get_chunk(self, name: str) -> bytes:
        self.asked.set()
        assert self.let_go.wait(20)
        return self.raw

    def latest(self, session: SessionId) -> Manifest | None:
        return self.manifest

    def begin(self) -> Draft:
        raise StoreError("this store is for reading")

    def list(self) -> Sequence[StoredSnapshot]:
        return []

    def finish(self, session: SessionId) -> None:
        return

    def delete(self, session: SessionId) -> int:
        return 0

    def sweep(self) -> Swept:
        return Swept(0, 0)

    def figures(self) -> StoreFigures:
        return StoreFigures(0, 1, 0, 0, 0)


class Bench:
    """A restorer over a slow store, and a session that waits for it."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        holder = processes.start_holder()
        self.worker = Worker(folder, "new", holder)
        layout = self.worker.layout
        manifest = Manifest(
            session=SESSION,
            generation=1,
            key=KEY,
            fingerprint=layout.fingerprint(),
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            prompt_len=len(PROMPT),
            prompt_hash=prompt_hash(PROMPT),
            kv_len=8,
            outputs=tuple(OUTPUTS),
            chunks=("a" * 32, "b" * 32),
            created_at=1.0,
        )
        self.store = SlowStore(manifest, b"\7" * layout.block_bytes)
        self.counters = Counters()
        sources = Sources(holder, Devices(pytest.fail), Suspects(folder / "suspects"))
        self.lineage = Lineage()
        self.restorer = Restorer(sources, Sums(), self.counters, self.store, lineage=self.lineage)
        self.slot = self.worker.wait(SESSION, PROMPT, OUTPUTS, [5, 6])

    def order(self, deadline_s: float = 10.0) -> Order:
        return Order(SESSION, SESSION, None, self.worker.arena, 2, deadline_s)

    def written(self) -> bool:
        return any(self.worker.view[:])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def bench(processes: Processes, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, processes)
    yield bench
    bench.worker.close()


async def test_what_is_restored_from_kv_that_was_computed_again_descends_from_it(bench: Bench) -> None:
    bench.store.let_go.set()
    bench.store.manifest = replace(bench.store.manifest, recomputed=True)
    assert not bench.lineage.descends(SESSION, 2)
    assert (await bench.restorer.restore(bench.order())).ok
    assert bench.lineage.descends(SESSION, 2)
    found = ArenaReader(bench.worker.arena).find(SESSION, 2)
    assert found is not None
    assert bench.lineage.is_again(found)


async def test_what_is_restored_from_other_kv_does_not(bench: Bench) -> None:
    bench.store.let_go.set()
    assert (await bench.restorer.restore(bench.order())).ok
    assert not bench.lineage.descends(SESSION, 2)


async def test_a_cancelled_restore_answers_only_when_nothing_writes_any_more(bench: Bench) -> None:
    task = asyncio.create_task(bench.restorer.restore(bench.order()))
    assert await asyncio.to_thread(bench.store.asked.wait, 10)
    task.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    assert bench.slot.inbox() == (LoadState.NONE, 0)
    bench.store.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.written()
    assert bench.slot.inbox() == (LoadState.FAILED, 0)
    assert bench.counters.failures[Reason.INTERNAL] == 1


async def test_an_engine_that_stopped_waiting_is_never_told_done(bench: Bench) -> None:
    task = asyncio.create_task(bench.restorer.restore(bench.order()))
    assert await asyncio.to_thread(bench.store.asked.wait, 10)
    bench.slot.report(LoadState.FAILED, 0, 0)
    bench.store.let_go.set()
    result = await task
    assert (result.ok, result.reason) == (False, "gone")
    assert bench.slot.inbox() == (LoadState.FAILED, 0)


async def test_a_restore_that_outlives_its_deadline_is_answered_as_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = bench.order()
    task = asyncio.create_task(bench.restorer.restore(order))
    assert await asyncio.to_thread(bench.store.asked.wait, 10)
    # It was in time until then, however slow this machine is.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + order.deadline_s)
    monkeypatch.setattr(orders, "time", clock)
    await asyncio.sleep(0.05)
    assert bench.slot.inbox() == (LoadState.NONE, 0)
    bench.store.let_go.set()
    result = await task
    assert (result.ok, result.reason) == (False, "deadline")
    assert bench.slot.inbox() == (LoadState.FAILED, 0)


async def test_the_same_restore_is_not_begun_twice(bench: Bench) -> None:
    task = asyncio.create_task(bench.restorer.restore(bench.order()))
    assert await asyncio.to_thread(bench.store.asked.wait, 10)
    with pytest.raises(MoverError, match="runs already") as caught:
        await bench.restorer.restore(bench.order())
    assert caught.value.reason is Reason.BUSY
    bench.store.let_go.set()
    assert (await task).ok
    assert bench.slot.inbox() == (LoadState.DONE, 8)


async def test_a_stored_block_of_the_wrong_size_is_not_written(bench: Bench) -> None:
    bench.store.raw = bench.store.raw[:-1]
    bench.store.let_go.set()
    result = await bench.restorer.restore(bench.order())
    assert (result.ok, result.reason) == (False, "corrupt")
    assert not bench.written()


async def test_a_snapshot_of_another_layout_is_not_written(bench: Bench) -> None:
    bench.store.let_go.set()
    for changes in ({"fingerprint": "0" * 32}, {"block_bytes": 1}):
        fields = {name: getattr(bench.store.manifest, name) for name in Manifest.__slots__}
        kept, bench.store.manifest = bench.store.manifest, Manifest(**fields | changes)
        assert (await bench.restorer.restore(bench.order())).reason == "layout"
        bench.store.manifest = kept
    assert not bench.written()


@pytest.mark.parametrize(("failing", "reason"), [("GPU-1", "fault"), ("GPU-2", "")])
async def test_a_restore_that_was_copied_while_the_gpu_of_its_source_failed_is_no_restore(
    processes: Processes, tmp_path: Path, failing: str, reason: str
) -> None:
    faults = Faults(lambda text: None)

    class Failing(HostPool):
        def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
            done = super().copy_all(destination, works, started)
            faults.happened(failing, "cannot run another one's blocks")
            return done

    class OnGpu(Sources):
        async def pool(self, path: Path) -> Pool:
            found = await super().pool(path)
            assert isinstance(found, HostPool)
            if path == old.arena:
                made = Failing(found.name, found.layout, found.fingerprint, found.view, found.identity)
                found = self._arenas[path].pool = replace(made, gpus=frozenset({"GPU-1"}))
            return found

    holder = processes.start_holder()
    old, new = Worker(tmp_path, "old", holder), Worker(tmp_path, "new", holder)
    devices = Devices(pytest.fail)
    devices._faults = faults
    suspects = Suspects(tmp_path / "suspects")
    restorer = Restorer(OnGpu(holder, devices, suspects), Sums(), Counters(), None)
    old.run(SESSION, PROMPT, OUTPUTS, [1, 2])
    waits = new.wait(SESSION, PROMPT, OUTPUTS, [5, 6])
    result = await restorer.restore(Order(SESSION, SESSION, (old.arena, 1), new.arena, 2, 5.0))
    assert (result.ok, result.reason) == (not reason, reason)
    assert waits.inbox() == ((LoadState.FAILED, 0) if reason else (LoadState.DONE, 8))
    suspects.save()
    assert ("suspects" in os.listdir(tmp_path)) is bool(reason)
    for worker in (old, new):
        worker.close()
