"""What tests on a GPU find there: the folder with the small model, and the command `vllm` (docs/gpu.md)."""

import os
import shutil
from pathlib import Path

import pytest

HOME_VARIABLE = "MIDSTREAM_TEST_GPU_HOME"


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of a real model that vLLM can serve here."""
    home = os.environ.get(HOME_VARIABLE)
    if not home:
        pytest.skip(f"{HOME_VARIABLE} names no folder with a model")
    model = Path(home) / "smollm2"
    assert (model / "config.json").is_file(), f"{model} is no model folder; see docs/gpu.md"
    assert shutil.which("vllm"), "there is no command `vllm` on the path; see docs/gpu.md"
    return model
