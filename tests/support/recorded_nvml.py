"""NVML without a card: what it told somewhere is played back. `Played` for the watch, `Module` in place of `pynvml`.

`Module` has the words, numbers and errors of the real `pynvml`, installed for tests; only its calls are others.
"""

import queue
import time
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from midstream.sidecar.cards.health import Event, Reading

A, B = "GPU-aaaa", "GPU-bbbb"
Memory = namedtuple("Memory", "total free used")
Rates = namedtuple("Rates", "gpu memory")
Process = namedtuple("Process", "pid usedGpuMemory")


class Played:
    """Readings as they are set, and events as they are put."""

    def __init__(self, *uuids: str) -> None:
        self.readings = {uuid: Reading(uuid, "H200", free_bytes=1, total_bytes=2) for uuid in uuids or (A,)}
        self.events: queue.Queue[Event] = queue.Queue()
        self.is_closed = False
        self.hangs_s = 0.0

    def cards(self) -> list[str]:
        return list(self.readings)

    def wait(self, within_s: float) -> Event | None:
        try:
            return self.events.get(timeout=within_s)
        except queue.Empty:
            return None

    def read(self, uuid: str) -> Reading:
        time.sleep(self.hangs_s)
        return self.readings[uuid]

    def close(self) -> None:
        self.is_closed = True


class Error(int):
    """A code that is raised."""


@dataclass(eq=False)
class Device:
    """One card as NVML has it; what has no answer is not supported."""

    uuid: str
    answers: dict[str, Any] = field(default_factory=dict)


class Module:
    """`pynvml` over `devices`; events are (device, type, data)."""

    def __init__(self, devices: list[Device], events: list[tuple[Device, int, int]] | None = None) -> None:
        self.devices = devices
        self.events = list(events or [])
        self.registered: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if name[:1].isupper() or name.startswith(("nvmlEventType", "nvmlClocksEventReason")):
            return getattr(pynvml, name)
        if not hasattr(pynvml, name):
            raise AttributeError(name)
        return lambda *arguments: self._called(name, arguments)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None: ...

    def nvmlDeviceRegisterEvents(self, device: Device, kinds: int, events: object) -> None:
        self.registered.append((device.uuid, kinds))

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        device, kind, data = self.events.pop(0)
        return namedtuple("Data", "device eventType eventData")(device, kind, data)

    def _called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        device = arguments[0] if arguments else None
        answers: Mapping[str, Any] = device.answers if isinstance(device, Device) else {}
        answer = answers.get(name, Error(pynvml.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(answer, Error):
            raise pynvml.NVMLError(int(answer))
        return answer
