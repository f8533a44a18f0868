"""Device pools: KV memory on a GPU that outlives the process which made it.

Owns the making and mapping of VMM memory that can be shared as a descriptor, and the naming of GPUs across processes.
Invariant: whatever fails half-way leaves nothing behind, and the memory lives exactly as long as a descriptor or a
mapping of it does. CUDA is the driver's, through `cuda.bindings`, and is loaded when a function here is first called:
this module imports anywhere. Contexts are the primary ones, which torch shares; they are kept until the process ends.
It does not copy, and does not know what lies in a pool (`layout.py`), nor who keeps it (`held.py`).
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import PoolError

_contexts: dict[int, Any] = {}
_lock = threading.Lock()


@dataclass(slots=True)
class DeviceMapping:
    """A pool in this process's address space, readable and writable by kernels on `device`."""

    address: int
    size_bytes: int
    device: int
    _closed: bool = False

    def close(self) -> None:
        """Take the mapping away; nothing on the device may use it any more. Raises PoolError, and only once."""
        if self._closed:
            return
        self._closed = True
        driver = _driver()
        with current(self.device):
            _done(driver.cuMemUnmap(self.address, self.size_bytes), "unmap a device pool")
            _done(driver.cuMemAddressFree(self.address, self.size_bytes), "free the addresses of a device pool")


@dataclass(slots=True)
class DevicePool:
    """A pool that this process made: a descriptor for others (the caller closes it), and a mapping of its own."""

    fd: int
    size_bytes: int
    address: int
    mapping: DeviceMapping


def create_device_pool(size_bytes: int, device: int) -> DevicePool:
    """Make a zeroed pool of `size_bytes` or a little more (the device's granularity) on GPU `device`. PoolError."""
    if size_bytes < 1:
        raise PoolError(f"a pool of {size_bytes} bytes cannot be made; give at least 1")
    driver = _driver()
    what = f"make a pool of {size_bytes} bytes on GPU {device}"
    remedy = "give the engine less KV memory, or see what else is on this GPU"
    with current(device), contextlib.ExitStack() as undo:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        prop.requestedHandleTypes = _descriptor_kind(driver)
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = int(_done(driver.cuMemGetAllocationGranularity(prop, flag), what))
        size_bytes = rounded_up(size_bytes, granularity)
        with _released(driver, _done(driver.cuMemCreate(size_bytes, prop, 0), what, remedy)) as handle:
            mapping = _map(driver, handle, size_bytes, device)
            undo.callback(_close_quietly, mapping)
            _done(driver.cuMemsetD8(mapping.address, 0, size_bytes), what)
            _done(driver.cuCtxSynchronize(), what)
            fd = int(_done(driver.cuMemExportToShareableHandle(handle, _descriptor_kind(driver), 0), what))
        os.set_inheritable(fd, False)
        undo.pop_all()
        return DevicePool(fd, size_bytes, mapping.address, mapping)


def map_device_pool(fd: int, size_bytes: int, device: int) -> DeviceMapping:
    """Map a pool for kernels on GPU `device`, the one it lies on or a peer; `fd` stays the caller's. PoolError."""
    driver = _driver()
    with current(device):
        imported = driver.cuMemImportFromShareableHandle(fd, _descriptor_kind(driver))
        remedy = "it is no pool of a GPU that this process sees; check CUDA_VISIBLE_DEVICES"
        with _released(driver, _done(imported, "import a device pool", remedy)) as handle:
            return _map(driver, handle, size_bytes, device)


def register_host(address: int, size_bytes: int, device: int) -> int:
    """Let GPU `device` write into this process's own memory, whole pages of it; where it finds them. PoolError."""
    driver = _driver()
    what = f"register {size_bytes} bytes of host memory for GPU {device}"
    flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    with current(device):
        _done(driver.cuMemHostRegister(address, size_bytes, flags), what, "raise the limit on locked memory")
        return int(_done(driver.cuMemHostGetDevicePointer(address, 0), what))


def store_on_stream(stream: int, address: int, value: int, device: int) -> None:
    """Have GPU `device` store 8 bytes when all that was put on the stream before is done and can be seen. PoolError."""
    driver = _driver()
    flag = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _done(driver.cuStreamWriteValue64(stream, address, value, int(flag)), f"store behind a stream of GPU {device}")


def device_count() -> int:
    """How many GPUs this process sees. Raises PoolError where there is no CUDA."""
    return int(_done(_driver().cuDeviceGetCount(), "count the GPUs"))


def device_uuid(device: int) -> str:
    """The UUID of GPU `device`, as `nvidia-smi -L` prints it: ordinals mean something else in each process."""
    driver = _driver()
    handle = _done(driver.cuDeviceGet(device), f"find GPU {device}", "check CUDA_VISIBLE_DEVICES")
    raw = _done(driver.cuDeviceGetUuid(handle), f"name GPU {device}").bytes
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def device_of(gpu_uuid: str) -> int:
    """The ordinal that the GPU of that UUID has in this process. Raises PoolError."""
    for device in range(device_count()):
        if device_uuid(device) == gpu_uuid:
            return device
    raise PoolError(f"this process does not see {gpu_uuid}; start it with that GPU in CUDA_VISIBLE_DEVICES")


@contextlib.contextmanager
def current(device: int) -> Iterator[Any]:
    """GPU `device`'s primary context, current for this thread meanwhile. Raises PoolError."""
    driver = _driver()
    with _lock:
        context = _contexts.get(device)
        if context is None:
            handle = _done(driver.cuDeviceGet(device), f"find GPU {device}", "check CUDA_VISIBLE_DEVICES")
            context = _contexts[device] = _done(driver.cuDevicePrimaryCtxRetain(handle), f"use GPU {device}")
    _done(driver.cuCtxPushCurrent(context), f"use GPU {device}")
    try:
        yield context
    finally:
        driver.cuCtxPopCurrent()


def rounded_up(size_bytes: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size_bytes`."""
    return -(-size_bytes // unit) * unit


def _map(driver: Any, handle: Any, size_bytes: int, device: int) -> DeviceMapping:
    what = f"map a pool of {size_bytes} bytes for GPU {device}"
    remedy = "announce its real size, and map it on its own GPU or one that can read that directly"
    with contextlib.ExitStack() as undo:
        address = int(_done(driver.cuMemAddressReserve(size_bytes, 0, 0, 0), what, remedy))
        undo.callback(driver.cuMemAddressFree, address, size_bytes)
        _done(driver.cuMemMap(address, size_bytes, 0, handle, 0), what, remedy)
        undo.callback(driver.cuMemUnmap, address, size_bytes)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _done(driver.cuMemSetAccess(address, size_bytes, [access], 1), what, remedy)
        undo.pop_all()
    return DeviceMapping(address, size_bytes, device)


@contextlib.contextmanager
def _released(driver: Any, handle: Any) -> Iterator[Any]:
    """A handle that is given back in any case: mappings and descriptors keep the memory by themselves."""
    try:
        yield handle
    finally:
        driver.cuMemRelease(handle)


def _close_quietly(mapping: DeviceMapping) -> None:
    # The error that brought us here is the one to tell.
    with contextlib.suppress(PoolError):
        mapping.close()


def _descriptor_kind(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _driver() -> Any:
    """The driver's bindings, with the driver initialised. Raises PoolError where either is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PoolError(f"no CUDA bindings ({error}); install midstream with its extra `gpu`") from error
    _initialise(driver.cuInit)
    return driver


def _initialise(cu_init: Callable[[int], Any]) -> None:
    try:
        result = cu_init(0)
    # The bindings raise errors of several kinds where the driver's library is missing.
    except (RuntimeError, OSError, ImportError) as error:
        raise PoolError(f"no CUDA driver ({str(error)[:200]}); start this process where a GPU can be seen") from error
    _done(result, "initialise CUDA", "start this process where a GPU can be seen")


def _done(result: Any, what: str, remedy: str = "see the kernel's log (dmesg) for this GPU") -> Any:
    """What a driver call returned, without its status. Raises PoolError unless that is success."""
    status, *values = result
    if int(status) != 0:
        raise PoolError(f"cannot {what}: {status.name}; {remedy}")
    return values[0] if values else None
