"""The helper by itself: it works on the process that was meant and no other, and it always ends."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.adapters.cuda_checkpoint.driver import ProcessState
from support.sim_cuda import DRIVER, SimCuda, wait_for
from support.sim_trainers import GIB, Trainer, environ, trainers

# Many processes, real ones.
pytestmark = pytest.mark.service


@pytest.fixture
def sim() -> Iterator[SimCuda]:
    with tempfile.TemporaryDirectory(prefix="ms-park-") as name, SimCuda(Path(name)) as made:
        yield made


@pytest.fixture
def trainer(sim: SimCuda) -> Iterator[Trainer]:
    with trainers(sim, sim.path.parent) as [made]:
        yield made


class Helper:
    def __init__(self, sim: SimCuda, pid: int, started: int, driver: str = DRIVER) -> None:
        argv = [sys.executable, "-m", "midstream.adapters.cuda_checkpoint.helper"]
        argv += ["--pid", str(pid), "--started", str(started), "--driver", driver]
        self.popen = subprocess.Popen(
            argv, env=environ(sim), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.said = self.line()

    def send(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline() or b"{}")  # type: ignore[no-any-return]

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        self.send(json.dumps({"op": op, "deadline_s": 10, **more}))
        return self.line()

    def hang_up(self) -> int:
        """The keeper is gone."""
        self.popen.communicate(timeout=10)
        return self.popen.returncode


@pytest.fixture
def helper(sim: SimCuda, trainer: Trainer) -> Iterator[Helper]:
    made = Helper(sim, trainer.pid, trainer.process.started)
    yield made
    made.popen.kill()
    made.popen.communicate()


def test_it_tells_all_that_a_preflight_wants_to_know(helper: Helper, trainer: Trainer) -> None:
    assert helper.said == {"ready": True}
    look = helper.ask("look")
    assert (look["state"], look["held"], look["driver"]) == ("running", {"GPU-0": 2 * GIB}, [580, 159])
    assert [gpu["free_bytes"] for gpu in look["gpus"]] == [6 * GIB, 8 * GIB]


def test_a_process_that_has_the_pid_of_the_one_that_was_meant_is_not_touched(sim: SimCuda, trainer: Trainer) -> None:
    made = Helper(sim, trainer.pid, trainer.process.started + 1)
    assert (made.said["ready"], made.said["code"]) == (False, "GONE")
    assert made.hang_up() == 1


def test_a_process_that_ends_is_not_called_for_any_more(helper: Helper, trainer: Trainer, sim: SimCuda) -> None:
    trainer.popen.kill()
    trainer.popen.wait()
    answer = helper.ask("lock", timeout_ms=100)
    assert (answer["ok"], answer["code"], sim.calls) == (False, "GONE", [])


@pytest.mark.parametrize("line", ["", "[]", "{", '{"op": 3, "deadline_s": "soon"}', '{"op": "shutdown"}', "null"])
def test_what_is_no_request_is_answered_as_such(helper: Helper, line: str) -> None:
    helper.send(line)
    answer = helper.line()
    assert (answer["ok"], answer["code"]) == (False, "REQUEST")
    assert helper.ask("state")["state"] == "running"


def test_a_process_that_is_only_locked_goes_on_when_the_keeper_is_gone(
    helper: Helper, trainer: Trainer, sim: SimCuda
) -> None:
    assert helper.ask("lock", timeout_ms=1000) == {"ok": True}
    assert helper.hang_up() == 0
    assert sim.state(trainer.pid) is ProcessState.RUNNING
    trainer.goes_on()
    trainer.is_undisturbed()


def test_a_process_that_is_parked_stays_parked_when_the_keeper_is_gone(
    helper: Helper, trainer: Trainer, sim: SimCuda
) -> None:
    helper.ask("lock", timeout_ms=1000)
    sim.slow["checkpoint"] = 0.3
    helper.send(json.dumps({"op": "checkpoint", "deadline_s": 10}))
    assert helper.hang_up() == 0
    assert sim.state(trainer.pid) is ProcessState.CHECKPOINTED


def test_it_ends_by_itself_though_the_driver_does_not_answer(helper: Helper, trainer: Trainer, sim: SimCuda) -> None:
    sim.stuck.add(("lock", trainer.pid))
    began_s = time.monotonic()
    helper.send(json.dumps({"op": "lock", "timeout_ms": 100, "deadline_s": 1}))
    wait_for(lambda: helper.popen.poll() is not None, 10, lambda: "it lives on")
    assert 5 < time.monotonic() - began_s < 9
    sim.stuck.clear()


def test_without_bindings_it_says_what_is_missing(sim: SimCuda, trainer: Trainer) -> None:
    made = Helper(sim, trainer.pid, trainer.process.started, "midstream.adapters.cuda_checkpoint.bindings:connect")
    if made.said["ready"]:
        pytest.skip("there is a GPU here")
    assert made.said["code"] in ("BINDINGS", "NO_DRIVER", "NVML")
    assert made.hang_up() == 1
