"""Memory of a real GPU outlives its owner in the hands of a holder without CUDA, and goes with the last of them."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from midstream.adapters.pool_cuda import CudaMemory
from midstream.session import vram
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient, check_device_pool, rescue
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from support.device_rig import done, read_bytes, write_bytes

pytestmark = pytest.mark.gpu

SIZE = 256 << 20
IDENTITY = "0123456789abcdef" * 2
WORDS = b"the KV of a session"
FREED_WITHIN_S = 20.0

# Makes a pool, gives it to the holder, and writes to half of it until it is killed in the midst of that.
OWNER = """
import os, sys
from cuda.bindings import driver
from midstream.session import vram
from midstream.session.held import HolderClient
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
size, words = int(sys.argv[2]), bytes.fromhex(sys.argv[4])
pool = vram.create_device_pool(size, 0)
layout = PoolLayout(4, 16, (Plane(0, size // 4, size // 4),))
owner = {"pid": os.getpid(), "fd": pool.fd}
memory = cuda_memory(vram.device_uuid(0))
meta = PoolMeta(pool.size_bytes, layout, layout.fingerprint(), owner, memory, sys.argv[3])
with vram.current(0):
    for at in (0, size - len(words)):
        status, = driver.cuMemcpyHtoD(pool.address + at, words, len(words))
        assert int(status) == 0, status
    HolderClient(sys.argv[1]).put("w/1/0", pool.fd, meta.to_json())
    print(pool.fd, flush=True)
    while True:
        driver.cuMemsetD8(pool.address + size // 4, 7, size // 2)
        driver.cuCtxSynchronize()
"""


def free_bytes() -> int:
    """Memory that is free on the first GPU."""
    from cuda.bindings import driver

    with vram.current(0):
        status, free, _ = driver.cuMemGetInfo()
        assert int(status) == 0, status
        return int(free)


@contextlib.contextmanager
def holding() -> Iterator[tuple[HolderClient, "subprocess.Popen[bytes]"]]:
    """A holder as a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "holder.sock"
        process = subprocess.Popen([sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(path)])
        client = HolderClient(path)
        try:
            wait_for(lambda: path.exists(), 20)
            yield client, process
        finally:
            process.kill()
            process.wait()


@dataclass
class Owner:
    """A process that has made a pool and writes to it."""

    process: "subprocess.Popen[str]"
    fd: int

    def kill(self) -> None:
        """SIGKILL, while the GPU runs its writes; returns when it is gone."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def owning(client: HolderClient) -> Iterator[Owner]:
    """An owner whose pool the holder has."""
    arguments = [client._path, str(SIZE), IDENTITY, WORDS.hex()]
    process = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Owner(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(is_so: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_what_a_killed_owner_wrote_is_read_by_whoever_maps_it_after_it() -> None:
    with holding() as (client, holder), owning(client) as owner:
        time.sleep(0.2)
        owner.kill()
        fd, body = client.get("w/1/0")
        meta = PoolMeta.from_json(body)
        assert (meta.gpu_uuid, meta.identity) == (vram.device_uuid(0), IDENTITY)
        mapping = vram.map_device_pool(fd, meta.size_bytes, vram.device_of(str(meta.gpu_uuid)))
        try:
            assert read_bytes(mapping.address, len(WORDS)) == WORDS
            assert read_bytes(mapping.address + SIZE - len(WORDS), len(WORDS)) == WORDS
            # Between them lies what was written when it died, and beside that what nobody has written.
            assert set(read_bytes(mapping.address + SIZE // 4, 4096)) <= {0, 7}
            assert set(read_bytes(mapping.address + SIZE // 4 * 3, 4096)) == {0}
        finally:
            mapping.close()
            os.close(fd)
        # All that while, the one who held it had no CUDA in it.
        assert "libcuda" not in Path(f"/proc/{holder.pid}/maps").read_text()


def test_the_memory_is_free_again_when_its_last_descriptor_and_mapping_are_gone() -> None:
    with holding() as (client, _):
        before = free_bytes()
        with owning(client) as owner:
            owner.kill()
            wait_for(lambda: before - free_bytes() < SIZE + (64 << 20), FREED_WITHIN_S)
            assert before - free_bytes() >= SIZE
            fd, body = client.get("w/1/0")
            mapping = vram.map_device_pool(fd, int(body["size_bytes"]), 0)
            os.close(fd)
            assert client.drop("w/1/0")
            assert before - free_bytes() >= SIZE, "a mapping alone keeps it"
            assert read_bytes(mapping.address, len(WORDS)) == WORDS
            mapping.close()
            wait_for(lambda: before - free_bytes() < SIZE, FREED_WITHIN_S)


def test_a_pool_whose_holder_died_is_rescued_from_its_living_owner() -> None:
    with contextlib.ExitStack() as stack:
        client, holder = stack.enter_context(holding())
        owner = stack.enter_context(owning(client))
        fd, body = client.get("w/1/0")
        os.close(fd)
        holder.kill()
        holder.wait()
        rescued = rescue(owner.process.pid, owner.fd, str(body["memory"]))
        other, _ = stack.enter_context(holding())
        other.put("w/1/0", rescued, body)
        os.close(rescued)
        owner.kill()
        fd, body = other.get("w/1/0")
        mapping = vram.map_device_pool(fd, int(body["size_bytes"]), 0)
        os.close(fd)
        assert read_bytes(mapping.address, len(WORDS)) == WORDS
        mapping.close()


def test_a_new_pool_is_all_zeros_and_its_descriptor_is_one_that_a_holder_takes() -> None:
    pool = vram.create_device_pool(SIZE - 1, 0)
    try:
        assert pool.size_bytes == SIZE
        assert read_bytes(pool.address, SIZE).count(0) == SIZE
        print("a descriptor of device memory is", os.readlink(f"/proc/self/fd/{pool.fd}"))
        check_device_pool(pool.fd)
        assert not os.get_inheritable(pool.fd)
    finally:
        pool.mapping.close()
        os.close(pool.fd)


def test_two_mappings_are_one_memory_and_each_goes_alone() -> None:
    pool = vram.create_device_pool(SIZE, 0)
    mapping = vram.map_device_pool(pool.fd, SIZE, 0)
    os.close(pool.fd)
    write_bytes(mapping.address + 12345, WORDS)
    assert read_bytes(pool.address + 12345, len(WORDS)) == WORDS
    pool.mapping.close()
    assert read_bytes(mapping.address + 12345, len(WORDS)) == WORDS
    mapping.close()


def test_what_cannot_be_made_or_mapped_leaves_nothing_behind() -> None:
    with vram.current(0):
        before = free_bytes()
        for _ in range(3):
            with pytest.raises(PoolError, match="cannot make a pool"):
                vram.create_device_pool(1 << 42, 0)
        reader, writer = os.pipe()
        for fd in (reader, writer):
            with pytest.raises(PoolError, match="CUDA_VISIBLE_DEVICES"):
                vram.map_device_pool(fd, SIZE, 0)
            os.close(fd)
        pool = vram.create_device_pool(SIZE, 0)
        with pytest.raises(PoolError, match="real size"):
            vram.map_device_pool(pool.fd, 2 * SIZE, 0)
        pool.mapping.close()
        os.close(pool.fd)
        wait_for(lambda: before - free_bytes() < 2 << 20, FREED_WITHIN_S)


def test_gpus_have_the_names_that_nvidia_smi_gives_them() -> None:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {vram.device_uuid(device) for device in range(vram.device_count())} <= set(listed)
    for device in range(vram.device_count()):
        assert vram.device_of(vram.device_uuid(device)) == device


def test_another_gpu_of_the_host_maps_a_pool_and_reads_it() -> None:
    if vram.device_count() < 2:
        pytest.skip("one GPU")
    pool = vram.create_device_pool(SIZE, 0)
    write_bytes(pool.address, WORDS)
    mapping = vram.map_device_pool(pool.fd, SIZE, 1)
    assert read_bytes(mapping.address, len(WORDS), 1) == WORDS
    mapping.close()
    pool.mapping.close()
    os.close(pool.fd)


def test_an_engine_that_adopts_a_pool_has_what_the_one_before_wrote_in_its_tensors() -> None:
    import torch

    device = torch.device("cuda", 0)
    first = CudaMemory.create(SIZE, device)
    tensor = first.tensor(4096, 8192).view(torch.bfloat16)
    assert (tensor.data_ptr(), tensor.device, tensor.untyped_storage().nbytes()) == (first.address + 4096, device, 8192)
    tensor.copy_(torch.arange(4096, device=device) % 251)
    torch.cuda.synchronize()
    layout = PoolLayout(4, 16, (Plane(0, SIZE // 4, SIZE // 4),))
    meta = PoolMeta(first.size_bytes, layout, layout.fingerprint(), {}, first.memory, first.identity)
    assert meta.memory == cuda_memory(vram.device_uuid(0))
    second = CudaMemory.adopt(os.dup(first.fd), meta, device)
    assert second.identity == first.identity
    again = second.tensor(4096, 8192).view(torch.bfloat16)
    assert torch.equal(again, tensor)
    assert again.data_ptr() != tensor.data_ptr()

    # Graphs that were captured over it write to it as kernels do.
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        again.add_(0)
    stream.synchronize()
    with torch.cuda.graph(graph):
        again.add_(1)
    before = tensor.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensor, before + 1)


def test_a_pool_of_another_gpu_is_not_adopted() -> None:
    import torch

    layout = PoolLayout(4, 16, (Plane(0, 16, 16),))
    elsewhere = cuda_memory("GPU-00000000-0000-0000-0000-000000000000")
    meta = PoolMeta(SIZE, layout, layout.fingerprint(), {}, elsewhere, IDENTITY)
    with pytest.raises(PoolError, match="this engine runs on"):
        CudaMemory.adopt(0, meta, torch.device("cuda", 0))


def test_a_driver_call_that_succeeded_leaves_no_context_current_that_was_not() -> None:
    from cuda.bindings import driver

    vram.device_count()
    with vram.current(0):
        inner = done(driver.cuCtxGetCurrent())
    assert int(inner) != 0
    outer = done(driver.cuCtxGetCurrent())
    pool = vram.create_device_pool(1, 0)
    pool.mapping.close()
    os.close(pool.fd)
    assert int(done(driver.cuCtxGetCurrent())) == int(outer)
