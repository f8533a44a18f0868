"""The driver itself: `cuda.bindings` for what changes a process, NVML for what there is.

Owns nothing but the translation. Both libraries are loaded when a `CudaDriver` is made, never by an import. No context
is made on any GPU: `cuInit` is all that the calls need, and a context would take half a gigabyte of the card that is
being emptied. Of `cuda.core.checkpoint`, which does the same, only one message would come back for all errors.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .driver import About, DriverError, Gpu, Held, ProcessState

# What must be there, in the bindings and behind them.
CALLS = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "CUcheckpointLockArgs",
    "CUcheckpointCheckpointArgs",
    "CUcheckpointRestoreArgs",
    "CUcheckpointUnlockArgs",
    "CUcheckpointGpuPair",
)
_STATES = (ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED, ProcessState.FAILED)
_MIG_ON = 1


def connect() -> "CudaDriver":
    """The driver of this machine. DriverError where there is none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("BINDINGS", f"no CUDA bindings ({error}); install midstream with its extra `gpu`") from error
    try:
        import pynvml
    except ImportError as error:
        raise DriverError("BINDINGS", f"no NVML bindings ({error}); install midstream with its extra `gpu`") from error
    return CudaDriver(driver, pynvml)


class CudaDriver:
    """Fulfils `Driver`. `cuda` and `nvml` are the modules, given so that tests can give others."""

    def __init__(self, cuda: Any, nvml: Any) -> None:
        self._cuda = cuda
        self._nvml = nvml
        try:
            result = cuda.cuInit(0)
        # The bindings raise errors of several kinds where the driver's library is missing.
        except (RuntimeError, OSError, ImportError) as error:
            raise DriverError("NO_DRIVER", f"no CUDA driver ({str(error)[:200]}); run this where a GPU is") from error
        self._done(result, "initialise CUDA")
        self._told(nvml.nvmlInit, "initialise NVML")

    def about(self) -> About:
        """Version and missing calls."""
        version = str(self._told(self._nvml.nvmlSystemGetDriverVersion, "ask for the driver's version"))
        missing = tuple(name for name in CALLS if not hasattr(self._cuda, name))
        return About(tuple(int(part) for part in version.split(".") if part.isdigit()), missing)

    def devices(self) -> tuple[Gpu, ...]:
        """All GPUs that NVML sees."""
        return tuple(self._gpu(handle) for handle in self._handles())

    def held(self, pid: int) -> Held:
        """By the list of processes of each GPU. In a container without the host's pids it is empty."""
        found: dict[str, int] = {}
        for handle in self._handles():
            for process in self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses, "list processes", handle):
                # None where the driver does not tell how much it is; nothing must not be taken for an answer.
                if process.pid == pid and process.usedGpuMemory:
                    found[self._uuid(handle)] = int(process.usedGpuMemory)
        return Held(found)

    def state(self, pid: int) -> ProcessState:
        """What the driver says."""
        number = int(self._call("cuCheckpointProcessGetState", "ask for the state of", pid))
        if not 0 <= number < len(_STATES):
            raise DriverError("UNKNOWN_STATE", f"process {pid} is in a state ({number}) that is not known here")
        return _STATES[number]

    def lock(self, pid: int, timeout_ms: int) -> None:
        """With the driver's own time limit."""
        arguments = self._made("CUcheckpointLockArgs")
        arguments.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", "lock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """To host memory."""
        self._call("cuCheckpointProcessCheckpoint", "checkpoint", pid, self._made("CUcheckpointCheckpointArgs"))

    def restore(self, pid: int, pairs: Mapping[str, str]) -> None:
        """From host memory."""
        # Not all bindings have them, and where nothing moves the driver wants none.
        has_arguments = hasattr(self._cuda, "CUcheckpointRestoreArgs")
        arguments = self._made("CUcheckpointRestoreArgs") if pairs or has_arguments else None
        if arguments is not None and pairs:
            by_uuid = self._cuda_uuids()
            told = []
            for old, new in pairs.items():
                pair = self._made("CUcheckpointGpuPair")
                pair.oldUuid, pair.newUuid = _known(by_uuid, old), _known(by_uuid, new)
                told.append(pair)
            arguments.gpuPairs = told
            arguments.gpuPairsCount = len(told)
        self._call("cuCheckpointProcessRestore", "restore", pid, arguments)

    def unlock(self, pid: int) -> None:
        """To go on."""
        self._call("cuCheckpointProcessUnlock", "unlock", pid, self._made("CUcheckpointUnlockArgs"))

    def _gpu(self, handle: Any) -> Gpu:
        nvml = self._nvml
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, "ask for free memory", handle)
        served = self._optional(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or ()
        mode = self._optional(nvml.nvmlDeviceGetMigMode, handle)
        return Gpu(
            self._uuid(handle),
            str(self._told(nvml.nvmlDeviceGetName, "name a GPU", handle)),
            int(memory.total),
            int(memory.free),
            mode is not None and int(mode[0]) == _MIG_ON,
            frozenset(int(process.pid) for process in served),
        )

    def _handles(self) -> list[Any]:
        count = self._told(self._nvml.nvmlDeviceGetCount, "count the GPUs")
        return [self._told(self._nvml.nvmlDeviceGetHandleByIndex, "find a GPU", index) for index in range(count)]

    def _uuid(self, handle: Any) -> str:
        return str(self._told(self._nvml.nvmlDeviceGetUUID, "name a GPU", handle))

    def _cuda_uuids(self) -> dict[str, Any]:
        """The driver's own form of each UUID, of the GPUs that this process sees, which should be all."""
        import uuid

        found: dict[str, Any] = {}
        for ordinal in range(int(self._done(self._cuda.cuDeviceGetCount(), "count the GPUs"))):
            device = self._done(self._cuda.cuDeviceGet(ordinal), "find a GPU")
            raw = self._done(self._cuda.cuDeviceGetUuid(device), "name a GPU")
            found[f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"] = raw
        return found

    def _made(self, name: str) -> Any:
        kind = getattr(self._cuda, name, None)
        if kind is None:
            raise DriverError("BINDINGS", f"the CUDA bindings have no {name}; install cuda-bindings 13.3.1 or newer")
        return kind()

    def _call(self, name: str, verb: str, pid: int, *arguments: Any) -> Any:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise DriverError("BINDINGS", f"the CUDA bindings have no {name}; install cuda-bindings 13.3.1 or newer")
        try:
            result = function(pid, *arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            # Bindings that are newer than the driver find the function missing when it is called.
            raise DriverError("BINDINGS", f"cannot {verb} process {pid}: {str(error)[:200]}") from error
        return self._done(result, f"{verb} process {pid}")

    def _done(self, result: Any, what: str) -> Any:
        status, *values = result
        if int(status) != 0:
            code = str(getattr(status, "name", int(status))).removeprefix("CUDA_ERROR_")
            raise DriverError(code, f"cannot {what}: the driver says {code}")
        return values[0] if values else None

    def _told(self, ask: Callable[..., Any], what: str, *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            raise DriverError("NVML", f"cannot {what}: {error}; see whether nvidia-smi works here") from error

    def _optional(self, ask: Callable[..., Any], handle: Any) -> Any:
        """What not every card and driver tells."""
        try:
            return ask(handle)
        except self._nvml.NVMLError:
            return None


def _known(by_uuid: Mapping[str, Any], name: str) -> Any:
    try:
        return by_uuid[name]
    except KeyError:
        raise DriverError(
            "NO_DEVICE", f"CUDA sees no {name} here; unset CUDA_VISIBLE_DEVICES for this command"
        ) from None
