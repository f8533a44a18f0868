"""The watch over recorded events: its thread, the library's words, the metrics, and a driver that hangs or is gone."""

import asyncio
import time
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pynvml
import pytest

from midstream.session.errors import EngineError
from midstream.sidecar.cards.health import Event, Finding, Reading
from midstream.sidecar.cards.nvml import Library
from midstream.sidecar.cards.watch import CardWatch
from midstream.sidecar.cards.xid import Verdict
from midstream.sidecar.metrics import Metrics
from support.recorded_nvml import A, B, Device, Error, Memory, Module, Played, Process, Rates

Value = namedtuple("Value", "nvmlReturn value")
Ui = namedtuple("Ui", "uiVal")


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it comes from a thread
            await asyncio.sleep(0.01)


async def test_an_event_of_the_driver_is_told_at_once_with_its_card() -> None:
    nvml, found = Played(A, B), list[Finding]()
    watch = CardWatch(found.append, poll_s=0.05, open_nvml=lambda: nvml)
    watch.start()
    await until(lambda: len(watch.cards) == 2)
    nvml.events.put(Event(B, 79))
    await until(lambda: found)
    assert [(f.uuid, f.reason, f.verdict) for f in found] == [(B, "xid-79", Verdict.MOVE)]
    nvml.readings[A] = replace(nvml.readings[A], is_lost=True)
    await until(lambda: len(found) == 2)
    assert (found[1].uuid, found[1].reason) == (A, "lost")
    await watch.close()
    assert nvml.is_closed


async def test_a_hung_kernel_is_found_by_work_without_tokens() -> None:
    nvml, found = Played(A), list[Finding]()
    nvml.readings[A] = replace(nvml.readings[A], busy_percent=100, pids=frozenset({7}))
    seen: list[Reading] = []

    def progress(uuid: str, reading: Reading) -> tuple[int, int]:
        seen.append(reading)
        return 2, 40

    watch = CardWatch(found.append, poll_s=0.02, progress=progress, patience_s=0.2, open_nvml=lambda: nvml)
    watch.start()
    await until(lambda: found)
    await watch.close()
    assert (found[0].reason, seen[0].pids) == ("hung", frozenset({7}))
    assert watch.uuids_of(frozenset({7, 8})) == {A}
    assert watch.uuids_of(frozenset({8})) == frozenset()


async def test_without_nvml_nothing_is_watched_and_that_is_said() -> None:
    def missing() -> Played:
        raise EngineError("NVML does not answer; see whether nvidia-smi works here")

    watch = CardWatch(lambda _: None, poll_s=0.05, open_nvml=missing)
    watch.start()
    await until(lambda: watch.why_not)
    assert watch.told() == []
    await watch.close()


async def test_a_driver_that_hangs_holds_up_nobody() -> None:
    nvml = Played(A)
    nvml.hangs_s = 1.0
    watch = CardWatch(lambda _: None, poll_s=0.05, open_nvml=lambda: nvml)
    watch.start()
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - began_s < 0.5
    await watch.close()


async def test_each_card_is_in_the_metrics_with_what_was_found() -> None:
    nvml = Played(A)
    watch = CardWatch(lambda _: None, poll_s=0.05, open_nvml=lambda: nvml)
    metrics = Metrics()
    metrics.cards.told = watch.told
    assert b"midstream_card" not in metrics.render()
    watch.start()
    await until(lambda: watch.cards)
    nvml.events.put(Event(A, 63))
    await until(lambda: watch.cards[A].xids)
    text = metrics.render().decode()
    await watch.close()
    assert f'midstream_card_verdict{{gpu="{A}"}} 1.0' in text
    assert f'midstream_card_xids_total{{gpu="{A}",xid="63"}} 1.0' in text
    assert f'midstream_card_slowed{{gpu="{A}",limit="thermal"}} 0.0' in text
    assert f'midstream_card_free_bytes{{gpu="{A}"}} 1.0' in text
    assert "midstream_card_temperature_c" not in text


FULL = {
    "nvmlDeviceGetMemoryInfo": Memory(100, 40, 60),
    "nvmlDeviceGetName": "H200",
    "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
    "nvmlDeviceGetTotalEccErrors": 5,
    "nvmlDeviceGetUtilizationRates": Rates(98, 10),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetComputeRunningProcesses": [Process(11, 7), Process(12, None)],
    "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "nvmlDeviceGetFieldValues": [Value(pynvml.NVML_SUCCESS, Ui(1))],
    "nvmlDeviceGetSupportedEventTypes": pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeClock,
}


def test_the_library_s_answers_become_a_reading() -> None:
    device = Device(A, FULL)
    module = Module([device])
    library = Library(module)
    assert library.read(A) == Reading(
        A, "H200", ecc_uncorrected=5, remap_pending=True, remap_failed=False, recovery_action=1,
        slowed_by=frozenset({"thermal"}), busy_percent=98, temperature_c=61, free_bytes=40, total_bytes=100,
        pids=frozenset({11, 12}),
    )  # fmt: skip
    assert module.registered == [(A, pynvml.nvmlEventTypeXidCriticalError)]
    library.close()


def test_what_a_card_does_not_tell_is_nothing_and_one_that_is_lost_says_so() -> None:
    lost = Device(B, {"nvmlDeviceGetMemoryInfo": Error(pynvml.NVML_ERROR_GPU_IS_LOST)})
    library = Library(Module([Device(A, {}), lost]))
    assert library.read(A) == Reading(A)
    assert library.read(B) == Reading(B, is_lost=True)
    assert not library.tells_events
    assert library.wait(0.001) is None


@pytest.mark.parametrize(
    ("kind", "data", "event"),
    [
        (pynvml.nvmlEventTypeXidCriticalError, 94, Event(A, 94)),
        (pynvml.nvmlEventTypeDoubleBitEccError, 0, Event(A, 0, "ecc-double")),
        (pynvml.nvmlEventTypeGpuUnavailableError, 0, Event(A, 0, "unavailable")),
        (1 << 40, 0, Event(A, 0, "event-10000000000")),
    ],
)
def test_events_have_the_library_s_words(kind: int, data: int, event: Event) -> None:
    device = Device(A, FULL)
    library = Library(Module([device], [(device, kind, data)]))
    assert library.wait(0.1) == event
    assert library.wait(0.001) is None


def test_a_machine_without_a_driver_is_named() -> None:
    class Broken(Module):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    with pytest.raises(EngineError, match="nvidia-smi"):
        Library(Broken([]))
