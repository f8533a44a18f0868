"""Processes on a real GPU are parked and brought back: each step of the measurements as a test, with its bars."""

import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from midstream.loadtest.gpu import park_steps
from midstream.loadtest.gpu.parking import BARS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def figures(*words: str) -> dict[str, dict[str, Any]]:
    """What a step says, by name; AssertionError with its errors where it does not end well."""
    with tempfile.TemporaryDirectory(prefix="ms-park-") as place:
        argv = [sys.executable, "-m", park_steps.__name__, *words, "--folder", place]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("figure ") for line in done.stdout.splitlines() if line.startswith("figure ")]
    return {told["name"]: told for told in map(json.loads, lines)}


def met(*words: str) -> None:
    """Every figure that has a bar meets it."""
    found = figures(*words)
    assert found
    barred = 0
    for name, told in found.items():
        for start, (bar, at_least) in BARS.items():
            if name.startswith(start):
                barred += 1
                assert told["value"] >= bar if at_least else told["value"] <= bar, told
    assert barred, found


def test_the_bindings_have_every_call() -> None:
    met("about")


def test_a_training_loop_goes_on_as_if_it_had_not_been_parked() -> None:
    met("train", "150")


def test_memory_a_captured_graph_and_a_generator_come_back_as_they_were() -> None:
    met("image", "2", "as it comes")


@pytest.mark.parametrize("keeper", ["holder", "owner", "nobody"])
def test_a_shareable_pool_comes_back_with_its_bytes(keeper: str) -> None:
    met("pool", keeper)


def test_a_full_gpu_is_refused_and_the_process_is_intact() -> None:
    met("full")


def test_a_kernel_that_does_not_end_in_time_is_not_locked() -> None:
    met("busy")


@pytest.mark.parametrize("who", ["helper", "both"])
@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_a_call_whose_asker_is_killed_leaves_the_process_intact_or_ends_it_in_order(call: str, who: str) -> None:
    met("killed", call, who)


def test_a_gpu_s_state_is_read_and_nothing_is_wrong_with_it() -> None:
    from midstream.sidecar.cards.health import Card, read
    from midstream.sidecar.cards.nvml import opened
    from midstream.sidecar.cards.xid import Verdict

    nvml = opened()
    try:
        for uuid in nvml.cards():
            reading = nvml.read(uuid)
            assert reading.total_bytes
            assert reading.model
            card, _ = read(Card(uuid), reading, 0.0)
            assert card.verdict is not Verdict.MOVE, card.found
        assert nvml.wait(0.1) is None
    finally:
        nvml.close()
