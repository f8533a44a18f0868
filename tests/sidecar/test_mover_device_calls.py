"""What an error of the CUDA driver means for the mover: refused, or the end of it."""

import enum
from typing import Any

import pytest

from midstream.session.errors import PoolError
from midstream.sidecar.mover import device_calls
from midstream.sidecar.mover.device_calls import Calls, DeviceFault, Faults


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Scripted:
    """A driver whose stream answers what it is told to."""

    def __init__(self, *answers: Status) -> None:
        self.answers = list(answers)

    def cuStreamQuery(self, stream: object) -> tuple[Status]:
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0],)


def calls_of(driver: Any = None) -> tuple[Calls, list[str]]:
    told: list[str] = []
    return Calls(driver, Faults(told.append), "GPU-1"), told


def test_values_come_without_their_status() -> None:
    calls, told = calls_of()
    assert calls.do((Status.CUDA_SUCCESS,), "x") is None
    assert calls.do((Status.CUDA_SUCCESS, 5), "x") == 5
    assert calls.do((Status.CUDA_SUCCESS, 5, 6), "x") == (5, 6)
    assert told == []


def test_too_little_memory_is_refused_and_nothing_ends() -> None:
    calls, told = calls_of()
    with pytest.raises(PoolError, match="cannot have it: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        calls.do((Status.CUDA_ERROR_OUT_OF_MEMORY,), "have it")
    assert not isinstance(caught.value, DeviceFault)
    calls.check()
    assert told == []


def test_a_fault_is_told_once_and_nothing_goes_on_after_it() -> None:
    calls, told = calls_of(Scripted(Status.CUDA_ERROR_ILLEGAL_ADDRESS))
    with pytest.raises(DeviceFault, match="cannot copy: CUDA_ERROR_ILLEGAL_ADDRESS"):
        calls.wait(object(), "copy")
    with pytest.raises(DeviceFault):
        calls.do((Status.CUDA_ERROR_ILLEGAL_ADDRESS,), "launch")
    with pytest.raises(DeviceFault, match="cannot copy"):
        calls.check()
    assert len(told) == 1
    assert "started anew" in told[0]


def test_a_stream_is_waited_for_until_it_is_done() -> None:
    driver = Scripted(Status.CUDA_ERROR_NOT_READY, Status.CUDA_ERROR_NOT_READY, Status.CUDA_SUCCESS)
    calls, told = calls_of(driver)
    calls.wait(object(), "copy")
    assert (driver.answers, told) == ([Status.CUDA_SUCCESS], [])


def test_a_gpu_that_never_answers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_calls, "RUN_S_MAX", 0.02)
    calls, told = calls_of(Scripted(Status.CUDA_ERROR_NOT_READY))
    with pytest.raises(DeviceFault, match="has not answered"):
        calls.wait(object(), "copy")
    assert len(told) == 1
    assert "GPU-1" in told[0]


def test_a_fault_of_one_gpu_ends_the_calls_on_all_and_says_which_it_was() -> None:
    known: list[str | None] = []
    faults = Faults(lambda text: known.append(faults.gpu))
    one, other = Calls(None, faults, "GPU-1"), Calls(None, faults, "GPU-2")
    assert faults.gpu is None
    with pytest.raises(DeviceFault):
        other.do((Status.CUDA_ERROR_ILLEGAL_ADDRESS,), "launch")
    with pytest.raises(DeviceFault, match="GPU-2"):
        one.check()
    with pytest.raises(DeviceFault, match="GPU-2"):
        one.do((Status.CUDA_ERROR_ILLEGAL_ADDRESS,), "launch")
    # Known before anybody was told.
    assert known == ["GPU-2"]


def test_who_waits_for_a_stream_is_let_go_when_another_has_met_a_fault() -> None:
    calls, _ = calls_of(Scripted(Status.CUDA_ERROR_NOT_READY))
    calls.fault("the card has fallen off the bus")
    with pytest.raises(DeviceFault, match="fallen off"):
        calls.wait(object(), "copy")
