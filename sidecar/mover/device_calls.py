"""Calls of the CUDA driver, and what their failures mean for this process.

Owns the difference between what was refused (PoolError: no memory, no such thing; the next call may succeed) and a
*fault*: after most errors of running work a CUDA context answers every call with an error, and what it has written is
not to be trusted. A fault is told to whoever ends this process, and every call after it raises, on all GPUs. Which GPU
it was is kept: what lies there, or was in reach of its kernels, is suspect.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ...session.errors import PoolError

POLL_S = 0.0001
RUN_S_MAX = 20.0
# What says that there was not enough of something, and nothing about the context.
_REFUSALS = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"})


class DeviceFault(PoolError):
    """The GPU, or this process's use of it, has failed; this process must end."""


class Faults:
    """The first fault of this process, on whichever GPU; `on_fault` is told of it, once."""

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._text = ""
        # The GPU's UUID, from before anybody is told.
        self.gpu: str | None = None
        self._lock = threading.Lock()

    def happened(self, gpu: str, text: str) -> DeviceFault:
        """A fault of a GPU; returns the error to raise."""
        with self._lock:
            first = self.gpu is None
            if first:
                self._text = f"{text}; the mover is started anew, see the kernel's log (dmesg) for {gpu}"
                self.gpu = gpu
        if first:
            self._on_fault(self._text)
        return DeviceFault(self._text)

    def check(self) -> None:
        """Raise DeviceFault if there was a fault."""
        if self.gpu is not None:
            raise DeviceFault(self._text)


class Calls:
    """The driver's calls for one GPU of this process, until a fault of any."""

    def __init__(self, driver: Any, faults: Faults, gpu: str) -> None:
        self.driver = driver
        self.gpu = gpu
        self._faults = faults

    def do(self, result: Any, what: str) -> Any:
        """What a call returned, without its status: nothing, one value, or several as a tuple.

        Raises PoolError where it was refused, DeviceFault where this process must end.
        """
        status, *values = result
        if int(status) != 0:
            if status.name in _REFUSALS:
                raise PoolError(f"cannot {what}: {status.name}; give the engines on this GPU less KV memory")
            raise self.fault(f"cannot {what}: {status.name}")
        return tuple(values) if len(values) > 1 else values[0] if values else None

    def wait(self, stream: Any, what: str) -> None:
        """Return when a stream has done everything. Raises DeviceFault, also when it has not within RUN_S_MAX.

        Asked again and again, because a driver that waits by itself could never be given up, and might keep Python's
        lock meanwhile.
        """
        deadline_s = time.monotonic() + RUN_S_MAX
        while True:
            (status,) = self.driver.cuStreamQuery(stream)
            if int(status) == 0:
                return
            if status.name != "CUDA_ERROR_NOT_READY":
                raise self.fault(f"cannot {what}: {status.name}")
            if time.monotonic() >= deadline_s:
                raise self.fault(f"cannot {what}: the GPU has not answered for {RUN_S_MAX:g} s")
            self.check()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise DeviceFault if there was a fault."""
        self._faults.check()

    def fault(self, text: str) -> DeviceFault:
        """A fault has happened: tell it, once; returns the error to raise."""
        return self._faults.happened(self.gpu, text)
