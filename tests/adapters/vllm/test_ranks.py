"""Ranks that are counted row by row are those of vLLM, and its sampler counts them so from the first token on."""

import os
import subprocess
from pathlib import Path

import pytest

from midstream.sidecar import plugin_path
from midstream.sidecar.environments import VLLM_ENVIRON
from support.vllm_rig import PYTHON_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(180)]

# What torch compiles is left alone here: the function that was written is what counts.
PROGRAM = """
import torch
from midstream.adapters.vllm import ranks
from vllm.v1.sample import sampler
theirs = sampler.batched_count_greater_than._torchdynamo_orig_callable
ranks.install()
ours = sampler.batched_count_greater_than
assert ours is not theirs
torch.manual_seed(1)
for rows, words in ((1, 7), (2, 1000), (9, 49152)):
    x = torch.randn(rows, words).round(decimals=1)
    x[:, 0] = float("-inf")
    for values in (x[:, 3:4], x[:, :1], x.max(-1, keepdim=True).values):
        got, wanted = ours(x, values), theirs(x, values)
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype, (got, wanted)
print("equal")
"""


def test_the_numbers_are_vllm_s_own(tmp_path: Path) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no vLLM")
    environ = {**os.environ, **VLLM_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(tmp_path))}
    told = subprocess.run([python, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=170)
    assert told.stdout.splitlines()[-1:] == ["equal"], told.stderr[-2000:]
