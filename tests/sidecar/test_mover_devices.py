"""The mover where a pool lies on a GPU, without one: it refuses with a reason and serves on, and a fault ends it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from midstream.session import vram
from midstream.session.arena import LoadState
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.session.layout import PoolMeta, cuda_memory
from midstream.sidecar.mover import device
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.device_calls import Faults
from midstream.sidecar.mover.process import FAULT_STATUS
from midstream.sidecar.mover.protocol import MoverError, Reason
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.suspects import Suspects
from support.mover_rig import KEY, Processes, Worker

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = [100, 101, 102]

# A mover whose first GPU fails as soon as it is asked for.
FAILING = """
import sys
from midstream.sidecar.mover import process
class Failing(process.Devices):
    def get(self, gpu_uuid):
        raise self._faults.happened(gpu_uuid, "cannot run 3 blocks: CUDA_ERROR_ECC_UNCORRECTABLE")
process.Devices = Failing
sys.exit(process.main(sys.argv[1:]))
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
async def mover(processes: Processes, holder: HolderClient) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover("--poll-s", "0.005"))
    yield client
    await client.close()


GPU = "GPU-00000000-0000-0000-0000-000000000000"


def on_a_gpu(folder: Path, name: str, holder: HolderClient, gpu: str = GPU) -> Worker:
    """A worker that says its pool is on a GPU: of such a descriptor nobody but the driver knows better."""
    made = Worker(folder, name, holder)
    fd = os.eventfd(0)
    made.pool_name = f"{name}/2/0"
    memory = cuda_memory(gpu)
    meta = PoolMeta(made.size, made.layout, made.layout.fingerprint(), {}, memory, "0" * 32)
    holder.put(made.pool_name, fd, meta.to_json())
    os.close(fd)
    made.writer.publish({"key": KEY, "pools": [made.pool_name]})
    return made


async def test_without_cuda_pools_on_a_gpu_are_refused_by_name_and_others_work_on(
    mover: MoverClient, holder: HolderClient, processes: Processes, tmp_path: Path
) -> None:
    on_gpu = on_a_gpu(tmp_path, "gpu", holder)
    old, new = Worker(tmp_path, "old", holder), Worker(tmp_path, "new", holder)
    await mover.watch(on_gpu.arena, "gpu")
    on_gpu.run(SESSION, PROMPT, OUTPUTS, [1, 2])
    old.run(OTHER, PROMPT, OUTPUTS, [1, 2])
    refused = new.wait(SESSION, PROMPT, OUTPUTS, [5, 6])
    served = new.wait(OTHER, PROMPT, OUTPUTS, [7, 8])
    results = [
        await mover.restore(session, source=(source, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
        for session, source in ((SESSION, on_gpu.arena), (OTHER, old.arena))
    ]
    assert (results[0].ok, results[0].reason) == (False, "pool")
    assert "CUDA" in results[0].error
    assert results[1].ok
    assert refused.inbox() == (LoadState.FAILED, 0)
    assert served.inbox() == (LoadState.DONE, 8)
    # It was noticed while the engine started, and said.
    assert "event=no_pool worker=gpu" in processes.log()
    assert processes.log().count("event=no_pool") == 1
    assert "Traceback" not in processes.log()
    for one in (on_gpu, old, new):
        one.close()


def test_a_gpu_that_was_refused_is_tried_again_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def refuse(gpu_uuid: str) -> int:
        tries.append(gpu_uuid)
        raise PoolError("no such GPU; look for it")

    monkeypatch.setattr(vram, "device_of", refuse)
    monkeypatch.setattr(device, "AGAIN_S", 0.05)
    devices = device.Devices(pytest.fail)
    began = time.monotonic()
    while time.monotonic() - began < 0.3:
        with pytest.raises(PoolError, match="no such GPU"):
            devices.get("GPU-1")
        time.sleep(0.001)
    # At once, after 0.05 s and after 0.1 s more; the next time would be after 0.2 s more.
    assert 2 <= len(tries) <= 3


async def test_a_fault_touches_what_lies_on_its_gpu_and_what_nobody_could_place_yet(
    holder: HolderClient, tmp_path: Path
) -> None:
    here, there = on_a_gpu(tmp_path, "here", holder), on_a_gpu(tmp_path, "there", holder, GPU[:-1] + "1")
    host, starting, unplaced = (Worker(tmp_path, name, holder) for name in ("host", "starting", "unplaced"))
    starting.writer.publish({"key": KEY, "pools": []})
    workers = (here, there, host, starting, unplaced)
    faults = Faults(lambda text: None)
    devices = device.Devices(pytest.fail)
    devices._faults = faults
    suspects = Suspects(tmp_path / "suspects")
    sources = Sources(holder, devices, suspects)
    for worker in (here, there):
        # There is no CUDA here, but where it lies is known from then on.
        with pytest.raises(MoverError):
            await sources.prepare(worker.arena)
    await sources.prepare(host.arena)
    for worker in (starting, unplaced):
        sources.reader(worker.arena)
    assert all(sources.is_untouched(worker.arena) for worker in workers)
    faults.happened(GPU, "cannot run 3 blocks")
    assert [sources.is_untouched(worker.arena) for worker in workers] == [False, True, True, True, False]
    suspects.save()
    noted = Suspects(tmp_path / "suspects")
    sources = Sources(holder, device.Devices(pytest.fail), noted)
    assert [sources.is_untouched(worker.arena) for worker in workers] == [False, True, True, True, False]
    for worker in workers:
        worker.close()


async def reason_of(request: Awaitable[object]) -> Reason | None:
    """Why a request was refused."""
    try:
        await request
    except MoverError as error:
        return error.reason
    return None


async def start_failing(processes: Processes, folder: Path) -> tuple["subprocess.Popen[str]", MoverClient]:
    command = [sys.executable, "-c", FAILING, "--socket", str(processes.mover_path)]
    command += ["--holder", str(processes.holder_path), "--store", str(folder / "store"), "--poll-s", "0.005"]
    mover = await asyncio.to_thread(subprocess.Popen, command, stderr=subprocess.PIPE, text=True)
    for _ in range(1000):
        if processes.mover_path.exists():
            break
        await asyncio.sleep(0.01)
    return mover, MoverClient(processes.mover_path)


async def test_a_gpu_that_fails_ends_the_mover_with_its_reason_and_no_engine_waits(
    holder: HolderClient, processes: Processes, tmp_path: Path
) -> None:
    on_gpu, new = on_a_gpu(tmp_path, "gpu", holder), Worker(tmp_path, "new", holder)
    on_gpu.run(SESSION, PROMPT, OUTPUTS, [1, 2])
    waits = new.wait(SESSION, PROMPT, OUTPUTS, [5, 6])
    mover, client = await start_failing(processes, tmp_path)
    # It may be gone before it has answered on its socket.
    with contextlib.suppress(MoverError):
        result = await client.restore(
            SESSION, source=(on_gpu.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5
        )
        assert not result.ok
    _, log = await asyncio.to_thread(mover.communicate, timeout=20)
    assert mover.returncode == FAULT_STATUS
    assert "event=gpu_failed error=cannot run 3 blocks: CUDA_ERROR_ECC_UNCORRECTABLE" in log
    assert "Traceback" not in log
    assert waits.inbox() == (LoadState.FAILED, 0)
    await client.close()
    for one in (on_gpu, new):
        one.close()


async def test_what_a_fault_may_have_touched_is_refused_by_every_mover_after_it_and_the_rest_is_not(
    holder: HolderClient, processes: Processes, tmp_path: Path
) -> None:
    on_gpu, untold = on_a_gpu(tmp_path, "gpu", holder), on_a_gpu(tmp_path, "untold", holder)
    old, new = Worker(tmp_path, "old", holder), Worker(tmp_path, "new", holder)
    for worker, session in ((on_gpu, SESSION), (old, OTHER)):
        worker.run(session, PROMPT, OUTPUTS, [1, 2])
    # Snapshots that were stored before stay good.
    client = MoverClient(processes.start_mover("--store", str(tmp_path / "store")))
    assert (await client.snapshot(old.arena, OTHER)).stored == 1
    await client.close()
    assert processes.mover is not None
    processes.mover.terminate()
    assert await asyncio.to_thread(processes.mover.wait, 20) == 0
    mover, client = await start_failing(processes, tmp_path)
    with contextlib.suppress(MoverError):
        await client.watch(old.arena, "old")
        await client.watch(on_gpu.arena, "gpu")
    await asyncio.to_thread(mover.communicate, timeout=20)
    assert mover.returncode == FAULT_STATUS
    await client.close()
    noted = f"{processes.mover_path}.suspects"
    assert os.stat(noted).st_mode & 0o777 == 0o600
    for again in range(2):
        client = MoverClient(processes.start_mover("--store", str(tmp_path / "store"), "--poll-s", "0.005"))
        waits = new.wait(SESSION, PROMPT, OUTPUTS, [5, 6], 2 + again)
        result = await client.restore(
            SESSION, source=(on_gpu.arena, 1), to_arena=new.arena, to_generation=2 + again, deadline_s=5
        )
        assert (result.ok, result.reason) == (False, "fault")
        assert "snapshots that were stored before, or from the journal" in result.error
        assert str(on_gpu.arena) in result.error
        assert "GPU-00000000-0000-0000-0000-000000000000" in result.error
        assert waits.inbox() == (LoadState.FAILED, 0)
        refused = (
            client.verify(on_gpu.arena, SESSION, 1),
            client.snapshot(on_gpu.arena, SESSION),
            client.seal(on_gpu.arena),
            client.sound(on_gpu.arena),
        )
        reasons = await asyncio.gather(*map(reason_of, refused))
        assert reasons == [Reason.FAULT] * 4
        assert (await client.status())["failures_fault"] == 2
        # Neither host memory, nor an engine that no mover had seen at the fault, nor what was stored.
        await client.sound(untold.arena)
        served = new.wait(OTHER, PROMPT, OUTPUTS, [7, 8], 2 + again)
        result = await client.restore(
            OTHER, source=(old.arena, 1) if again else None, to_arena=new.arena, to_generation=2 + again, deadline_s=5
        )
        assert result.ok, result
        assert served.inbox() == (LoadState.DONE, 8)
        for slot in (waits, served):
            slot.finish("abort")
        await client.close()
        processes.mover.terminate()
        assert await asyncio.to_thread(processes.mover.wait, 20) == 0
    # With its arena goes the note.
    on_gpu.arena.unlink()
    client = MoverClient(processes.start_mover())
    await client.status()
    assert os.path.basename(noted) not in os.listdir(tmp_path)
    await client.close()
    for one in (on_gpu, untold, old, new):
        one.close()


async def test_a_mover_that_cannot_note_what_is_suspect_stays_and_refuses_it(
    holder: HolderClient, processes: Processes, tmp_path: Path
) -> None:
    on_gpu = on_a_gpu(tmp_path, "gpu", holder)
    on_gpu.run(SESSION, PROMPT, OUTPUTS, [1, 2])
    in_the_way = f"{processes.mover_path}.suspects.new"
    os.mkdir(in_the_way)
    mover, client = await start_failing(processes, tmp_path)
    await client.watch(on_gpu.arena, "gpu")
    await asyncio.sleep(1.5)
    assert mover.poll() is None
    for request in (client.sound(on_gpu.arena), client.verify(on_gpu.arena, SESSION, 1)):
        assert await reason_of(request) is Reason.FAULT
    os.rmdir(in_the_way)
    _, log = await asyncio.to_thread(mover.communicate, timeout=20)
    assert mover.returncode == FAULT_STATUS
    assert log.count("event=suspects_not_saved") == 1
    assert os.access(f"{processes.mover_path}.suspects", os.R_OK)
    await client.close()
    on_gpu.close()
