"""NVML, as the watch needs it: the cards, what the driver tells of them by itself, and what it says when it is asked.

Owns the library's handles. Nothing is loaded by an import, and no context is made on any card. What one card, driver or
container does not tell is None, never an error; a card that has gone is a reading that says so. Calls block for
milliseconds, `wait` for as long as it is told: use it in a thread.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

from ...session.errors import EngineError
from .health import Event, Reading

# Words for events that are no Xid.
_WORDS = {
    "nvmlEventTypeDoubleBitEccError": "ecc-double",
    "nvmlEventTypeSingleBitEccErrorStorm": "ecc-storm",
    "nvmlEventTypeDramRetirementEvent": "row-retired",
    "nvmlEventTypeDramRetirementFailure": "row-not-retired",
    "nvmlEventTypeNonFatalPoisonError": "poison",
    "nvmlEventTypeFatalPoisonError": "poison-fatal",
    "nvmlEventTypeGpuUnavailableError": "unavailable",
    "nvmlEventTypeGpuRecoveryAction": "recovery-changed",
}
_XID = "nvmlEventTypeXidCriticalError"
_THERMAL = ("nvmlClocksEventReasonHwThermalSlowdown", "nvmlClocksEventReasonSwThermalSlowdown")
_POWER = ("nvmlClocksEventReasonHwPowerBrakeSlowdown",)
_CORE = 0


class Nvml(Protocol):
    """What the watch asks."""

    def cards(self) -> list[str]:
        """UUIDs of all cards."""
        ...

    def wait(self, within_s: float) -> Event | None:
        """The next event; None when there was none in time. Where no events are told it waits all the same."""
        ...

    def read(self, uuid: str) -> Reading:
        """A card as it is."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def opened() -> "Library":
    """NVML of this machine. EngineError says why there is none."""
    try:
        import pynvml
    except ImportError as error:
        raise EngineError(f"no NVML bindings ({error}); install midstream with its extra `gpu`") from error
    return Library(pynvml)


class Library:
    """Fulfils `Nvml` by the module `pynvml`, which is given so that tests can give another."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = {}
            for index in range(count):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self._handles[str(nvml.nvmlDeviceGetUUID(handle))] = handle
        except nvml.NVMLError as error:
            raise EngineError(f"NVML does not answer ({error}); see whether nvidia-smi works here") from error
        self._by_address = {_address(handle): uuid for uuid, handle in self._handles.items()}
        self._events = self._registered()

    @property
    def tells_events(self) -> bool:
        """Whether the driver tells anything by itself here: not in every sandbox, nor of every card."""
        return self._events is not None

    def cards(self) -> list[str]:
        """UUIDs in the driver's order."""
        return list(self._handles)

    def wait(self, within_s: float) -> Event | None:
        """One event."""
        if self._events is None:
            time.sleep(within_s)
            return None
        try:
            data = self._nvml.nvmlEventSetWait_v2(self._events, max(int(within_s * 1000), 1))
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) != self._nvml.NVML_ERROR_TIMEOUT:
                # A card that has gone says so in its readings; a set that is broken is not asked again at once.
                time.sleep(within_s)
            return None
        uuid = self._by_address.get(_address(data.device), "")
        if data.eventType == getattr(self._nvml, _XID):
            return Event(uuid, int(data.eventData))
        for name, word in _WORDS.items():
            if data.eventType == getattr(self._nvml, name, None):
                return Event(uuid, 0, word)
        return Event(uuid, 0, f"event-{int(data.eventType):x}")

    def read(self, uuid: str) -> Reading:
        """All that it tells."""
        nvml, handle = self._nvml, self._handles[uuid]
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            gone = (nvml.NVML_ERROR_GPU_IS_LOST, getattr(nvml, "NVML_ERROR_RESET_REQUIRED", None))
            if getattr(error, "value", None) in gone:
                return Reading(uuid, is_lost=True)
            memory = None
        rows = self._asked(nvml.nvmlDeviceGetRemappedRows, handle)
        usage = self._asked(nvml.nvmlDeviceGetUtilizationRates, handle)
        processes = self._asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return Reading(
            uuid,
            str(self._asked(nvml.nvmlDeviceGetName, handle) or ""),
            ecc_uncorrected=self._number(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            recovery_action=self._recovery_action(handle),
            slowed_by=self._slowed_by(handle),
            busy_percent=None if usage is None else int(usage.gpu),
            temperature_c=self._number(nvml.nvmlDeviceGetTemperature, handle, _CORE),
            free_bytes=None if memory is None else int(memory.free),
            total_bytes=None if memory is None else int(memory.total),
            pids=frozenset(int(process.pid) for process in processes or ()),
        )

    def driver(self) -> str:
        """The driver's version; empty where it does not tell."""
        return str(self._asked(self._nvml.nvmlSystemGetDriverVersion) or "")

    def close(self) -> None:
        """Let go of the library."""
        if self._events is not None:
            self._asked(self._nvml.nvmlEventSetFree, self._events)
            self._events = None
        self._asked(self._nvml.nvmlShutdown)

    def _registered(self) -> Any:
        nvml = self._nvml
        events = self._asked(nvml.nvmlEventSetCreate)
        if events is None:
            return None
        wanted = getattr(nvml, _XID)
        for name in _WORDS:
            wanted |= getattr(nvml, name, 0)
        registered = 0
        for handle in self._handles.values():
            supported = self._asked(nvml.nvmlDeviceGetSupportedEventTypes, handle)
            if supported is not None and supported & wanted:
                registered += self._did(nvml.nvmlDeviceRegisterEvents, handle, supported & wanted, events)
        if registered:
            return events
        self._asked(nvml.nvmlEventSetFree, events)
        return None

    def _recovery_action(self, handle: Any) -> int | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = None if field is None else self._asked(self._nvml.nvmlDeviceGetFieldValues, handle, [field])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _slowed_by(self, handle: Any) -> frozenset[str]:
        nvml = self._nvml
        reasons = self._asked(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        found = set()
        for word, names in (("thermal", _THERMAL), ("power", _POWER)):
            if any(reasons & getattr(nvml, name, 0) for name in names):
                found.add(word)
        return frozenset(found)

    def _number(self, ask: Callable[..., Any], *arguments: Any) -> int | None:
        value = self._asked(ask, *arguments)
        return None if value is None else int(value)

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None

    def _did(self, do: Callable[..., Any], *arguments: Any) -> bool:
        try:
            do(*arguments)
        except self._nvml.NVMLError:
            return False
        return True


def _address(handle: Any) -> Any:
    """What is equal for two handles of one card: they are pointers, and each call makes an object of its own."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (TypeError, ctypes.ArgumentError):
        return handle
