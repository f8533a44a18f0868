"""Calls of the CUDA driver, and what their failures mean for this process.

Owns the difference between what was refused (PoolError: no memory, no such thing; the next call may succeed) and a
*fault*: after most errors of running work a CUDA context answers every call with an error, and what it has written is
not to be trusted. A fault is told to whoever ends this process, and every call after it raises, on all GPUs.
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


class Calls:
    """The driver's calls for all GPUs of this process, until a fault."""

    def __init__(self, driver: Any, on_fault: Callable[[str], None]) -> None:
        self.driver = driver
        self._on_fault = on_fault
        self._fault: str | None = None
        self._lock = threading.Lock()

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
        if self._fault is not None:
            raise DeviceFault(self._fault)

    def fault(self, text: str) -> DeviceFault:
        """A fault has happened: tell it, once; returns the error to raise."""
        with self._lock:
            first = self._fault is None
            if first:
                self._fault = f"{text}; the mover is started anew, see the kernel's log (dmesg) for this GPU"
        if first:
            self._on_fault(str(self._fault))
        return DeviceFault(self._fault)
