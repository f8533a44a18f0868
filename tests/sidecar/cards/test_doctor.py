"""What the doctor says of cards, and of parking on them."""

import sys
import types

import pynvml
import pytest

from midstream.adapters.cuda_checkpoint.bindings import CALLS
from midstream.session.errors import EngineError
from midstream.sidecar import doctor_engine
from midstream.sidecar.cards import doctor
from midstream.sidecar.cards.nvml import Library
from midstream.sidecar.doctor import Check, Verdict
from support.recorded_nvml import A, B, Device, Error, Memory, Module


def told(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> dict[str, Check]:
    class Versioned(Module):
        def nvmlSystemGetDriverVersion(self) -> str:
            return "580.159.03"

    monkeypatch.setattr(doctor, "opened", lambda: Library(Versioned(list(devices))))
    return {check.name: check for check in doctor.cards()}


def bindings(monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
    """CUDA's bindings with these calls."""
    driver = types.ModuleType("cuda.bindings.driver")
    for name in calls:
        setattr(driver, name, object())
    package = types.ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())


def test_a_card_that_is_well_one_to_be_watched_and_one_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings(monkeypatch, *CALLS)
    name, memory = {"nvmlDeviceGetName": "H200"}, {"nvmlDeviceGetMemoryInfo": Memory(3 << 20, 2 << 20, 1 << 20)}
    well = Device(A, {**name, **memory, "nvmlDeviceGetTemperature": 40})
    remapped = Device(B, {**name, "nvmlDeviceGetRemappedRows": (0, 1, 1, 0)})
    lost = Device("GPU-cccc", {"nvmlDeviceGetMemoryInfo": Error(pynvml.NVML_ERROR_GPU_IS_LOST)})
    found = told(monkeypatch, well, remapped, lost)
    assert [found[f"card {uuid}"].verdict for uuid in (A, B, "GPU-cccc")] == [Verdict.OK, Verdict.WARN, Verdict.FAIL]
    assert found[f"card {A}"].fact == "H200, 40 °C, 2 of 3 MiB free"
    assert "at the next reset" in found[f"card {B}"].fact
    assert found["card events"].verdict is Verdict.WARN
    assert found["parking"] == Check("parking", Verdict.OK, "driver 580.159.03 can checkpoint processes")


@pytest.mark.parametrize(
    ("lacking", "said"),
    [("cuCheckpointProcessLock", "have no cuCheckpointProcessLock"), ("CUcheckpointGpuPair", "own GPU")],
)
def test_bindings_that_lack_a_call_are_a_warning(monkeypatch: pytest.MonkeyPatch, lacking: str, said: str) -> None:
    bindings(monkeypatch, *(name for name in CALLS if name != lacking))
    found = doctor.parking("580.1")
    assert (found.verdict, said in found.fact) == (Verdict.WARN, True)


def test_a_parked_worker_is_nothing_to_mend() -> None:
    found = doctor_engine._worker_state({"name": "a", "state": "parked", "detail": "parked"})
    assert (found.verdict, "midstream unpark" in found.fact) == (Verdict.OK, True)


@pytest.mark.parametrize(
    ("driver", "verdict", "said"),
    [
        ("550.90", Verdict.WARN, "cannot checkpoint"),
        ("575.1", Verdict.WARN, "their own GPU alone"),
        ("", Verdict.WARN, ""),
    ],
)
def test_older_drivers_park_less_or_nothing(
    monkeypatch: pytest.MonkeyPatch, driver: str, verdict: Verdict, said: str
) -> None:
    bindings(monkeypatch, *CALLS)
    found = doctor.parking(driver)
    assert found.verdict is verdict
    assert said in found.fact


def test_a_machine_without_nvml_is_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Library:
        raise EngineError("NVML does not answer (Driver Not Loaded)")

    monkeypatch.setattr(doctor, "opened", missing)
    [found] = doctor.cards()
    assert (found.verdict, bool(found.remedy)) == (Verdict.WARN, True)
