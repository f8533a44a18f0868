"""Device pools against a driver that keeps account: whatever fails, nothing is left behind, and the error says what."""

import os
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.session import vram
from midstream.session.errors import PoolError

UNIT = 2 << 20
UUIDS = (bytes(range(16)), bytes(range(16, 32)))
NAMES = ("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")


class Struct(SimpleNamespace):
    """A structure of the driver's, whose members are there before they are written."""

    def __getattr__(self, name: str) -> "Struct":
        self.__dict__[name] = made = Struct()
        return made


class Driver:
    """Two GPUs. Each call that makes something is undone by one other, and `left` is what has not been."""

    CUmemAllocationProp = CUmemAccessDesc = Struct
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="descriptor")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self) -> None:
        self.failing = ""
        self.left: set[str] = set()
        self.contexts: list[int] = []
        self.calls: list[str] = []
        self.written: list[tuple[int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        call = self.__class__.__dict__.get(f"_{name}")
        if call is None:
            raise AttributeError(name)

        def called(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name == self.failing:
                return Status(2, "CUDA_ERROR_OUT_OF_MEMORY"), None
            found = call(self, *args)
            return (Status(0, "CUDA_SUCCESS"),) if found is None else (Status(0, "CUDA_SUCCESS"), found)

        return called

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuDeviceGetCount(self) -> int:
        return len(UUIDS)

    def _cuDeviceGet(self, device: int) -> int:
        return device

    def _cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=UUIDS[device])

    def _cuDevicePrimaryCtxRetain(self, device: int) -> str:
        return f"context {device}"

    def _cuCtxPushCurrent(self, context: str) -> None:
        self.contexts.append(int(context[-1]))

    def _cuCtxPopCurrent(self) -> int:
        return self.contexts.pop()

    def _cuCtxSynchronize(self) -> None:
        pass

    def _cuMemGetAllocationGranularity(self, prop: Struct, flag: str) -> int:
        assert (prop.type, prop.location.type, prop.requestedHandleTypes) == ("pinned", "device", "descriptor")
        return UNIT

    def _cuMemCreate(self, size: int, prop: Struct, flags: int) -> str:
        assert size % UNIT == 0
        self.left.add("handle")
        return "handle"

    def _cuMemImportFromShareableHandle(self, fd: int, kind: str) -> str:
        self.left.add("handle")
        return "handle"

    def _cuMemRelease(self, handle: str) -> None:
        self.left.remove("handle")

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        self.left.add("addresses")
        return 1 << 40

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert "mapping" not in self.left
        self.left.remove("addresses")

    def _cuMemMap(self, address: int, size: int, offset: int, handle: str, flags: int) -> None:
        self.left.add("mapping")

    def _cuMemUnmap(self, address: int, size: int) -> None:
        self.left.remove("mapping")

    def _cuMemSetAccess(self, address: int, size: int, access: list[Struct], count: int) -> None:
        assert (access[0].location.id, access[0].flags, count) == (self.contexts[-1], "rw", 1)

    def _cuMemsetD8(self, address: int, value: int, count: int) -> None:
        self.written.append((address, value, count))

    def _cuMemExportToShareableHandle(self, handle: str, kind: str, flags: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        assert (size, flags, len(self.contexts)) == (4096, 3, 1)
        self.left.add(f"registered {address}")

    def _cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        assert f"registered {address}" in self.left
        return address + (1 << 40)

    def _cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> None:
        assert flags == 0, "without the barrier the store may be seen before what it speaks of"
        self.written.append((address, value, stream))


class Status:
    """What a call of the driver says first."""

    def __init__(self, code: int, name: str) -> None:
        self._code, self.name = code, name

    def __int__(self) -> int:
        return self._code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver that `cuda.bindings` gives."""
    found = Driver()
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(vram, "_contexts", {})
    yield found
    assert found.contexts == [], "a context was left current"


def test_a_pool_is_zeroed_rounded_up_and_holds_only_its_mapping_and_descriptor(driver: Driver) -> None:
    pool = vram.create_device_pool(UNIT + 1, 1)
    assert (pool.size_bytes, pool.address) == (2 * UNIT, 1 << 40)
    assert driver.written == [(1 << 40, 0, 2 * UNIT)]
    assert not os.get_inheritable(pool.fd)
    os.close(pool.fd)
    assert driver.left == {"addresses", "mapping"}
    pool.mapping.close()
    pool.mapping.close()
    assert driver.left == set()


MAKING = (
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemsetD8",
    "cuCtxSynchronize",
    "cuMemExportToShareableHandle",
)


@pytest.mark.parametrize("call", MAKING)
def test_whichever_call_fails_nothing_is_left_of_a_pool_that_was_to_be_made(driver: Driver, call: str) -> None:
    driver.failing = call
    with pytest.raises(PoolError, match="CUDA_ERROR_OUT_OF_MEMORY; "):
        vram.create_device_pool(UNIT, 0)
    assert call in driver.calls
    assert driver.left == set()


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_whichever_call_fails_nothing_is_left_of_a_mapping_either(driver: Driver, call: str) -> None:
    driver.failing = call
    with pytest.raises(PoolError, match="CUDA_ERROR_OUT_OF_MEMORY; "):
        vram.map_device_pool(5, UNIT, 0)
    assert call in driver.calls
    assert driver.left == set()


def test_a_mapping_is_for_the_device_that_asks_and_goes_when_it_is_closed(driver: Driver) -> None:
    mapping = vram.map_device_pool(5, UNIT, 1)
    assert (mapping.address, mapping.size_bytes, mapping.device) == (1 << 40, UNIT, 1)
    assert driver.left == {"addresses", "mapping"}
    mapping.close()
    assert driver.left == set()


def test_host_memory_is_registered_and_stored_to_behind_a_stream(driver: Driver) -> None:
    begin = vram.register_host(8192, 4096, 1)
    assert begin == 8192 + (1 << 40)
    vram.store_on_stream(77, begin + 8, 5, 1)
    assert driver.written == [(begin + 8, 5, 77)]
    driver.failing = "cuStreamWriteValue64"
    with pytest.raises(PoolError, match="behind a stream of GPU 1"):
        vram.store_on_stream(77, begin + 8, 5, 1)
    driver.failing = "cuMemHostRegister"
    with pytest.raises(PoolError, match="locked memory"):
        vram.register_host(8192, 4096, 0)


def test_gpus_are_told_apart_by_uuid(driver: Driver) -> None:
    assert [vram.device_uuid(device) for device in range(vram.device_count())] == list(NAMES)
    assert [vram.device_of(name) for name in NAMES] == [0, 1]
    with pytest.raises(PoolError, match="CUDA_VISIBLE_DEVICES"):
        vram.device_of("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")


def test_a_pool_of_nothing_is_refused_before_the_driver_is_asked() -> None:
    with pytest.raises(PoolError, match="at least 1"):
        vram.create_device_pool(0, 0)


def test_without_bindings_or_a_driver_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(PoolError, match="extra `gpu`"):
        vram.device_count()

    def missing(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(cuInit=missing)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.raises(PoolError, match=r"libcuda.*where a GPU can be seen"):
        vram.map_device_pool(5, UNIT, 0)
