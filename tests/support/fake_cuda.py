"""The modules `cuda.bindings.driver` and `pynvml` as far as parking calls them, over one process and two cards.

What is called is what is noted; answers are the driver's tuples. There is no card behind it: what a real one does is in
tests/gpu.
"""

from collections import namedtuple
from typing import Any

import pynvml

from support.recorded_nvml import Device, Memory, Module, Process

UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")
Uuid = namedtuple("Uuid", "bytes")


NAMES = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    600: "CUDA_ERROR_NOT_READY",
}


class Status(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return NAMES[int(self)]


class Arguments:
    """A structure of arguments: whatever is set."""


class Cuda:
    """`driver`. `state` is what the process is in; `fails[name]` is the code of a call."""

    CUcheckpointLockArgs = CUcheckpointCheckpointArgs = CUcheckpointUnlockArgs = Arguments
    CUcheckpointRestoreArgs = CUcheckpointGpuPair = Arguments

    def __init__(self) -> None:
        self.state = 0
        self.fails: dict[str, int] = {}
        self.called: list[tuple[str, int, dict[str, Any]]] = []

    def cuInit(self, flags: int) -> tuple[Status]:
        return (Status(self.fails.get("cuInit", 0)),)

    def cuDeviceGetCount(self) -> tuple[Status, int]:
        return Status(0), len(UUIDS)

    def cuDeviceGet(self, ordinal: int) -> tuple[Status, int]:
        return Status(0), ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[Status, Uuid]:
        return Status(0), Uuid(bytes(15) + bytes([device + 1]))

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Status, int]:
        return Status(self.fails.get("cuCheckpointProcessGetState", 0)), self.state

    def cuCheckpointProcessLock(self, pid: int, arguments: Arguments) -> tuple[Status]:
        return self._call("cuCheckpointProcessLock", pid, arguments)

    def cuCheckpointProcessCheckpoint(self, pid: int, arguments: Arguments) -> tuple[Status]:
        return self._call("cuCheckpointProcessCheckpoint", pid, arguments)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Arguments | None) -> tuple[Status]:
        return self._call("cuCheckpointProcessRestore", pid, arguments)

    def cuCheckpointProcessUnlock(self, pid: int, arguments: Arguments) -> tuple[Status]:
        return self._call("cuCheckpointProcessUnlock", pid, arguments)

    def _call(self, name: str, pid: int, arguments: Arguments | None) -> tuple[Status]:
        self.called.append((name, pid, {} if arguments is None else vars(arguments)))
        return (Status(self.fails.get(name, 0)),)


class Nvml(Module):
    """`pynvml` with two cards, and a process on the first."""

    def __init__(self, pid: int) -> None:
        answers: dict[str, Any] = {"nvmlDeviceGetMemoryInfo": Memory(100, 60, 40), "nvmlDeviceGetName": "H200"}
        here = {**answers, "nvmlDeviceGetComputeRunningProcesses": [Process(pid, 30)], "nvmlDeviceGetMigMode": (1, 1)}
        here["nvmlDeviceGetMPSComputeRunningProcesses"] = [Process(pid, 30)]
        there = {**answers, "nvmlDeviceGetComputeRunningProcesses": []}
        super().__init__([Device(UUIDS[0], here), Device(UUIDS[1], there)])
        self.driver = "580.159.04"

    def nvmlSystemGetDriverVersion(self) -> str:
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return self.driver
