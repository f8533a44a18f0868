"""The mover where a pool lies on a GPU, without one: it refuses with a reason and serves on, and a fault ends it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
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
from midstream.sidecar.mover.process import FAULT_STATUS
from midstream.sidecar.mover.protocol import MoverError
from support.mover_rig import KEY, Processes, Worker

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = [100, 101, 102]

# A mover whose first GPU fails as soon as it is asked for.
FAILING = """
import sys
from midstream.session.errors import PoolError
from midstream.sidecar.mover import process
class Failing:
    def __init__(self, on_fault):
        self.on_fault = on_fault
    def get(self, gpu_uuid):
        self.on_fault("cannot run 3 blocks: CUDA_ERROR_ECC_UNCORRECTABLE")
        raise PoolError("gone")
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


def on_a_gpu(folder: Path, name: str, holder: HolderClient) -> Worker:
    """A worker that says its pool is on a GPU: of such a descriptor nobody but the driver knows better."""
    made = Worker(folder, name, holder)
    fd = os.eventfd(0)
    made.pool_name = f"{name}/2/0"
    memory = cuda_memory("GPU-00000000-0000-0000-0000-000000000000")
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


async def test_a_gpu_that_fails_ends_the_mover_with_its_reason_and_no_engine_waits(
    holder: HolderClient, processes: Processes, tmp_path: Path
) -> None:
    on_gpu, new = on_a_gpu(tmp_path, "gpu", holder), Worker(tmp_path, "new", holder)
    on_gpu.run(SESSION, PROMPT, OUTPUTS, [1, 2])
    waits = new.wait(SESSION, PROMPT, OUTPUTS, [5, 6])
    path = tmp_path / "failing.sock"
    command = [sys.executable, "-c", FAILING, "--socket", str(path), "--holder", str(processes.holder_path)]
    mover = await asyncio.to_thread(subprocess.Popen, command, stderr=subprocess.PIPE, text=True)
    for _ in range(1000):
        if path.exists():
            break
        await asyncio.sleep(0.01)
    client = MoverClient(path)
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
