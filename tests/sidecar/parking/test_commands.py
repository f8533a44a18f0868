"""`midstream park` and `unpark` of processes by pid: real commands, killed in every state of what they do."""

import json
import os
import signal
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
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ms-park-") as name:
        yield Path(name)


@pytest.fixture
def sim(folder: Path) -> Iterator[SimCuda]:
    with SimCuda(folder) as made:
        yield made


@pytest.fixture
def trainer(sim: SimCuda, folder: Path) -> Iterator[Trainer]:
    with trainers(sim, folder) as [made]:
        yield made


def command(sim: SimCuda, folder: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "midstream.sidecar.cli", *words, "--json"]
    given = {
        "MIDSTREAM_STATE_DIR": str(folder / "state"),
        "MIDSTREAM_PARK_COPY_S": "4",
        "MIDSTREAM_PARK_LOCK_S": "1",
        **more,
    }
    return subprocess.Popen(
        argv, env={**environ(sim), **given}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(sim: SimCuda, folder: Path, *words: str, **more: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, answer, and what was said beside it."""
    process = command(sim, folder, *words, **more)
    out, told = process.communicate(timeout=30)
    return process.returncode, json.loads(out) if out else {}, told


def park(sim: SimCuda, folder: Path, trainer: Trainer, *words: str) -> "subprocess.Popen[str]":
    words = ("park", str(trainer.pid), "--driver", DRIVER, "--host-memory", str(64 * GIB), *words)
    return command(sim, folder, *words)


def unpark(sim: SimCuda, folder: Path, trainer: Trainer, *words: str) -> tuple[int, dict[str, Any], str]:
    return run(sim, folder, "unpark", str(trainer.pid), "--driver", DRIVER, *words)


def test_a_process_is_parked_listed_and_brought_back_on_another_gpu(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    parking = park(sim, folder, trainer, "--probe", "exit 0")
    out, told = parking.communicate(timeout=30)
    assert (parking.returncode, json.loads(out)["state"]) == (0, "parked"), told
    status, listed, _ = run(sim, folder, "park")
    [row] = listed["parked"]
    assert (status, row["name"], row["state"]) == (0, f"pid-{trainer.pid}", "parked")
    assert row["gpus"] == {"GPU-0": "2.00 GiB"}
    status, answer, _ = unpark(sim, folder, trainer, "--gpu", "GPU-1")
    assert (status, answer["state"]) == (0, "running")
    assert sim.processes[trainer.pid].held == {"GPU-1": 2 * GIB}
    trainer.goes_on()
    trainer.is_undisturbed()
    assert run(sim, folder, "park")[1] == {"parked": []}
    status, _, told = unpark(sim, folder, trainer)
    assert status == 3
    assert "nothing of that name is parked" in told


def test_a_probe_that_says_no_ends_the_process(sim: SimCuda, folder: Path, trainer: Trainer) -> None:
    parking = park(sim, folder, trainer, "--probe", "echo it computes nonsense; exit 3")
    parking.communicate(timeout=30)
    status, answer, _ = unpark(sim, folder, trainer)
    assert (status, answer["state"]) == (1, "gone")
    assert "it computes nonsense" in answer["text"]
    assert trainer.popen.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("op", ["lock", "checkpoint"])
def test_a_command_that_is_killed_leaves_a_process_that_runs_or_is_parked(
    sim: SimCuda, folder: Path, trainer: Trainer, op: str
) -> None:
    sim.slow[op] = 0.5
    parking = park(sim, folder, trainer)
    sim.wait_called(op, trainer.pid)
    parking.kill()
    parking.communicate()
    if op == "lock":
        # The helper that had locked it unlocks it, though nobody asks.
        wait_for(lambda: ("unlock", trainer.pid) in sim.calls, 5, lambda: str(sim.calls))
        sim.wait_for(trainer.pid, ProcessState.RUNNING)
        trainer.goes_on()
    else:
        sim.wait_for(trainer.pid, ProcessState.CHECKPOINTED)
    status, answer, told = unpark(sim, folder, trainer)
    assert (status, answer.get("state")) == (0, "running"), (answer, told)
    trainer.goes_on()
    trainer.is_undisturbed()


@pytest.mark.parametrize("op", ["restore", "unlock"])
def test_a_command_that_is_killed_on_the_way_back_can_be_given_again(
    sim: SimCuda, folder: Path, trainer: Trainer, op: str
) -> None:
    park(sim, folder, trainer).communicate(timeout=30)
    sim.slow[op] = 0.5
    back = command(sim, folder, "unpark", str(trainer.pid), "--driver", DRIVER)
    sim.wait_called(op, trainer.pid)
    back.kill()
    back.communicate()
    status, answer, told = unpark(sim, folder, trainer)
    assert (status, answer.get("state")) == (0, "running"), (answer, told)
    trainer.goes_on()
    trainer.is_undisturbed()


@pytest.mark.parametrize("op", ["lock", "checkpoint", "restore", "unlock"])
def test_a_command_that_is_killed_with_its_helper_hangs_nothing_past_its_deadline(
    sim: SimCuda, folder: Path, trainer: Trainer, op: str
) -> None:
    if op in ("restore", "unlock"):
        park(sim, folder, trainer).communicate(timeout=30)
    sim.slow[op] = 0.5
    words = () if op in ("lock", "checkpoint") else ("unpark", str(trainer.pid), "--driver", DRIVER)
    started = command(sim, folder, *words) if words else park(sim, folder, trainer)
    sim.wait_called(op, trainer.pid)
    for helper in helpers_of(started.pid):
        os.kill(helper, signal.SIGKILL)
    started.kill()
    started.communicate()
    began_s = time.monotonic()
    status, answer, told = unpark(sim, folder, trainer, *(("--probe", "exit 0") if op == "unlock" else ()))
    assert time.monotonic() - began_s < 20
    assert (status, answer.get("state")) == (0, "running"), (answer, told)
    trainer.goes_on()
    trainer.is_undisturbed()


def test_ctrl_c_brings_a_park_to_rest_before_the_command_ends(sim: SimCuda, folder: Path, trainer: Trainer) -> None:
    sim.slow["lock"] = 0.5
    parking = park(sim, folder, trainer)
    sim.wait_called("lock", trainer.pid)
    parking.send_signal(signal.SIGINT)
    out, told = parking.communicate(timeout=20)
    assert parking.returncode == 1, told
    assert json.loads(out)["text"] == "the park was cancelled"
    trainer.goes_on()
    trainer.is_undisturbed()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("park", "1", "x"), "different pids"),
        (("park", "a", "b"), "one worker at a time"),
        (("park", "worker-0"), "no sidecar answers"),
        (("unpark", "worker-0"), "no sidecar answers"),
        (("park", "4194303"), "gone: there is no process"),
    ],
)
def test_what_cannot_be_meant_is_said(sim: SimCuda, folder: Path, words: tuple[str, ...], said: str) -> None:
    status, _, told = run(sim, folder, *words)
    assert status in (2, 3)
    assert said in told


def helpers_of(pid: int) -> list[int]:
    """The helpers that a command has started."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in children.read_text().split()]
    assert found
    return found
