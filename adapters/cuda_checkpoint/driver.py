"""What is asked of a CUDA driver to park a process: one narrow contract, and the words that it is spoken in.

Pure. Fulfilled by `bindings.py`, and in tests by a simulated driver that keeps to what was measured (docs/parking.md).
Every call is about one process and one only; what a group of them may do is `machine.py`'s business. Calls block, and
but for `lock` without a limit: they are made in a `helper.py`, which can be killed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ...session.errors import MidstreamError


class ProcessState(StrEnum):
    """What the driver says of a CUDA process."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Op(StrEnum):
    """The calls that change a process."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


# Codes of the driver that mean something here, without their prefix; any other is as bad as the worst of them.
NOT_READY = "NOT_READY"
INVALID_VALUE = "INVALID_VALUE"
OUT_OF_MEMORY = "OUT_OF_MEMORY"


class DriverError(MidstreamError):
    """A call did not succeed; `code` is the driver's, without `CUDA_ERROR_`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, whoever may see it. `is_split`: it is in MIG mode. `served`: pids of MPS clients on it."""

    uuid: str
    model: str
    total_bytes: int
    free_bytes: int
    is_split: bool = False
    served: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class About:
    """What can be done here at all: the driver's version, and which of the calls the bindings lack."""

    driver: tuple[int, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has on GPUs, by UUID, its context included. Empty where the driver does not tell."""

    by_gpu: Mapping[str, int] = field(default_factory=dict)


class Driver(Protocol):
    """The contract. Whatever does not succeed raises DriverError, and nothing else is raised."""

    def about(self) -> About:
        """Version and missing calls; asks nothing of any process."""
        ...

    def devices(self) -> tuple[Gpu, ...]:
        """All GPUs of the machine in the order of the driver, also those that a process does not see."""
        ...

    def held(self, pid: int) -> Held:
        """What a process has on each GPU now."""
        ...

    def state(self, pid: int) -> ProcessState:
        """The state of a process that has CUDA; DriverError for any other."""
        ...

    def lock(self, pid: int, timeout_ms: int) -> None:
        """RUNNING to LOCKED. NOT_READY after `timeout_ms`, and then it is RUNNING still."""
        ...

    def checkpoint(self, pid: int) -> None:
        """LOCKED to CHECKPOINTED: its VRAM is in host memory, and the GPUs are free of it."""
        ...

    def restore(self, pid: int, pairs: Mapping[str, str]) -> None:
        """CHECKPOINTED to LOCKED, each GPU's memory where `pairs` says; {} is where it was.

        MUST be given all GPUs of the machine or none, else INVALID_VALUE and it is CHECKPOINTED still. Out of memory
        the process is lost: no later try succeeds.
        """
        ...

    def unlock(self, pid: int) -> None:
        """LOCKED to RUNNING."""
        ...
