"""Real SGLang workers for tests, as the demo starts them."""

import os

import pytest

from midstream.sidecar.environments import SGLANG_OPTIONS
from support.vllm_rig import whole_model

PYTHON_VARIABLE = "MIDSTREAM_TEST_SGLANG_PYTHON"
BLOCK_TOKENS = 64
START_S = 240.0


def sglang_python() -> str:
    """The interpreter of SGLang's environment; skips the test where this machine has none."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no SGLang; `make test` sets it")
    return python


def sglang_command(*options: str) -> list[str]:
    """The command of one small worker of the demo's model."""
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(whole_model())]
    return [*command, "--served-model-name", "smollm2", *SGLANG_OPTIONS, *options]
