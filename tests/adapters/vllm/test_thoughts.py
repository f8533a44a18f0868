"""A budget for thoughts is spent as in the run that was interrupted: by vLLM's own counter, wherever it is cut."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm.thoughts import catch_up, steps
from midstream.sidecar import plugin_path
from midstream.sidecar.environments import VLLM_ENVIRON
from support.vllm_rig import PYTHON_VARIABLE

# A model that begins and ends thoughts at random, forced as vLLM forces it; cut everywhere.
PROGRAM = """
import random, types
import torch
from midstream.adapters.vllm import thoughts
from vllm.v1.sample import thinking_budget_state as module
BEGIN, END, CUTS, apart = [1], [2], 0, 0

def holder(begin, end):
    config = types.SimpleNamespace(reasoning_start_token_ids=begin, reasoning_end_token_ids=end)
    return module.ThinkingBudgetStateHolder(config, 1, 0, torch.device("cpu"), False)

def added(holder, prompt, outputs, budget):
    update = types.SimpleNamespace(removed=[], moved=[], added=[
        (0, types.SimpleNamespace(thinking_token_budget=budget), prompt, outputs)])
    holder.sync_batch(update)

def forced(holder, outputs):
    holder.update_state([outputs], None)
    state = holder._state[0]
    return state["in_end"] and bool(state["force_index"])

def run(holder, prompt, outputs, budget, source, length):
    added(holder, prompt, outputs, budget)
    said = []
    while len(outputs) < length:
        # Drawn for each position, as a seeded sampler does.
        drawn = source[len(outputs)]
        token = END[0] if forced(holder, outputs) else drawn
        outputs.append(token)
        said.append(token)
    return outputs

plain = module.ThinkingBudgetStateHolder.sync_batch
for seed in range(120):
    draw = random.Random(seed)
    prompt = draw.choice([[9, 9], [9, 1], [1, 9, 2], [1, 5, 5]])
    budget, length = draw.choice([0, 1, 3, 7, 15]), 40
    source = draw.choices([1, 2, 7, 8], [2, draw.choice([0, 1, 2]), 8, 8], k=length)
    module.ThinkingBudgetStateHolder.sync_batch = plain
    wanted = run(holder(BEGIN, END), prompt, [], budget, source, length)
    for cut in range(1, length):
        module.ThinkingBudgetStateHolder.sync_batch = plain
        apart += run(holder(BEGIN, END), prompt, wanted[:cut], budget, source, length) != wanted
        thoughts.install()
        got = run(holder(BEGIN, END), prompt, wanted[:cut], budget, source, length)
        assert got == wanted, (seed, cut, prompt, budget, wanted, got)
        CUTS += 1
print("equal", CUTS, apart)
"""


@pytest.mark.engine
@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_wherever_it_is_cut_the_rest_is_what_it_would_have_been(tmp_path: Path) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no vLLM")
    environ = {**os.environ, **VLLM_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(tmp_path))}
    told = subprocess.run([python, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=170)
    assert told.stdout.splitlines()[-1:], told.stderr[-2000:]
    word, cuts, apart = told.stdout.splitlines()[-1].split()
    assert (word, int(cuts)) == ("equal", 120 * 39)
    # Without the hook it would not have been.
    assert int(apart) > 0


def test_only_marks_and_what_is_before_them_are_steps() -> None:
    assert steps([], {1}) == []
    assert steps([5, 5, 5, 5], {1}) == [0]
    assert steps([5, 5, 1, 5, 5], {1}) == [0, 2, 3]
    assert steps([1, 2], {1, 2}) == [0, 1]


def test_a_counter_that_fails_on_old_outputs_sees_those_that_follow() -> None:
    def fails(state: dict[str, Any]) -> None:
        state["force_index"] = [0]
        raise KeyError("end_count")

    outputs = [5, 1, 5]
    holder = SimpleNamespace(think_start_token_ids=[1], think_end_token_ids=[2], _update_think_state=fails)
    state: dict[str, Any] = {"output_tok_ids": outputs, "spec_token_ids": [], "force_index": []}
    with pytest.raises(KeyError):
        catch_up(holder, state, outputs)
    # The list itself, which vLLM appends to, and nothing forced by a count that was broken off.
    assert state["output_tok_ids"] is outputs
    assert state["force_index"] == []
