"""The translation to CUDA's bindings and NVML: which calls are made with what, and how their errors come back."""

from typing import Any

import pytest

from midstream.adapters.cuda_checkpoint.bindings import CALLS, CudaDriver
from midstream.adapters.cuda_checkpoint.driver import About, Driver, DriverError, Gpu, ProcessState
from support.fake_cuda import UUIDS, Cuda, Nvml
from support.recorded_nvml import Process

PID = 77


def made(cuda: Any = None) -> tuple[CudaDriver, Any]:
    cuda = cuda or Cuda()
    driver = CudaDriver(cuda, Nvml(PID))
    contract: Driver = driver
    assert contract is driver
    return driver, cuda


def test_what_there_is() -> None:
    driver, _ = made()
    assert driver.about() == About((580, 159, 4), ())
    assert driver.devices() == (
        Gpu(UUIDS[0], "H200", 100, 60, True, frozenset({PID})),
        Gpu(UUIDS[1], "H200", 100, 60, False, frozenset()),
    )
    assert driver.held(PID).by_gpu == {UUIDS[0]: 30}
    assert driver.held(PID + 1).by_gpu == {}
    driver._nvml.devices[0].answers["nvmlDeviceGetComputeRunningProcesses"] = [Process(PID, None)]
    assert driver.held(PID).by_gpu == {}


@pytest.mark.parametrize(("number", "state"), list(enumerate(ProcessState)))
def test_states_have_the_driver_s_numbers(number: int, state: ProcessState) -> None:
    driver, cuda = made()
    cuda.state = number
    assert driver.state(PID) is state


def test_a_state_that_is_not_known_is_an_error_and_never_guessed() -> None:
    driver, cuda = made()
    cuda.state = 4
    with pytest.raises(DriverError) as caught:
        driver.state(PID)
    assert caught.value.code == "UNKNOWN_STATE"


def test_calls_are_made_with_what_the_driver_wants() -> None:
    driver, cuda = made()
    driver.lock(PID, 1500)
    driver.checkpoint(PID)
    driver.restore(PID, {})
    driver.unlock(PID)
    assert cuda.called == [
        ("cuCheckpointProcessLock", PID, {"timeoutMs": 1500}),
        ("cuCheckpointProcessCheckpoint", PID, {}),
        ("cuCheckpointProcessRestore", PID, {}),
        ("cuCheckpointProcessUnlock", PID, {}),
    ]


def test_a_map_is_told_in_the_driver_s_own_uuids() -> None:
    driver, cuda = made()
    driver.restore(PID, {UUIDS[0]: UUIDS[1], UUIDS[1]: UUIDS[0]})
    [(_, _, arguments)] = cuda.called
    pairs = [(pair.oldUuid.bytes[-1], pair.newUuid.bytes[-1]) for pair in arguments["gpuPairs"]]
    assert (pairs, arguments["gpuPairsCount"]) == ([(1, 2), (2, 1)], 2)
    with pytest.raises(DriverError, match="CUDA_VISIBLE_DEVICES") as caught:
        driver.restore(PID, {UUIDS[0]: "GPU-elsewhere"})
    assert caught.value.code == "NO_DEVICE"


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [("Lock", 600, "NOT_READY"), ("Restore", 2, "OUT_OF_MEMORY"), ("Unlock", 1, "INVALID_VALUE")],
)
def test_errors_come_back_as_the_driver_s_codes(call: str, number: int, code: str) -> None:
    driver, cuda = made()
    cuda.fails[f"cuCheckpointProcess{call}"] = number
    with pytest.raises(DriverError) as caught:
        {"Lock": lambda: driver.lock(PID, 1), "Restore": lambda: driver.restore(PID, {})}.get(
            call, lambda: driver.unlock(PID)
        )()
    assert caught.value.code == code
    assert f"process {PID}" in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_bindings_that_lack_anything_say_so_before_a_process_is_touched(name: str) -> None:
    class Older(Cuda):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)

    driver, cuda = made(Older())
    assert driver.about().missing == (name,)
    if name == "CUcheckpointRestoreArgs":
        driver.restore(PID, {})
        assert cuda.called == [("cuCheckpointProcessRestore", PID, {})]
        with pytest.raises(DriverError, match=r"13\.3\.1"):
            driver.restore(PID, {UUIDS[0]: UUIDS[0], UUIDS[1]: UUIDS[1]})


def test_a_driver_that_does_not_come_up_is_named() -> None:
    cuda = Cuda()
    cuda.fails["cuInit"] = 1
    with pytest.raises(DriverError, match="initialise CUDA"):
        made(cuda)
    driver, _ = made()
    driver._nvml.driver = ""
    with pytest.raises(DriverError) as caught:
        driver.about()
    assert caught.value.code == "NVML"
