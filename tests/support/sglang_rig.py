"""Real SGLang workers for tests, as the demo starts them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from midstream.loadtest.harness import SidecarProcess
from midstream.sidecar.environments import SGLANG_ENVIRON, SGLANG_OPTIONS
from support import forking
from support.vllm_rig import Rig, whole_model

PYTHON_VARIABLE = "MIDSTREAM_TEST_SGLANG_PYTHON"
BLOCK_TOKENS = 64
START_S = 240.0


def sglang_python() -> str:
    """The interpreter of SGLang's environment; skips the test where this machine has none."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no SGLang; `make test` sets it")
    return python


def sglang_command(*options: str, model: Path | None = None) -> list[str]:
    """The command of one small worker, of the demo's model if of no other."""
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model or whole_model())]
    return [*command, "--served-model-name", "smollm2", *SGLANG_OPTIONS, *options]


class SglangRig(Rig):
    """One sidecar and its SGLang workers."""

    def __init__(
        self,
        *options: str,
        workers: int,
        settings: Mapping[str, object] | None = None,
        model: Path | None = None,
        store: Path | None = None,
    ) -> None:
        command = sglang_command(*options, model=model)
        environ = {**SGLANG_ENVIRON, forking.VARIABLE: "1"}
        self.workers = workers
        self.sidecar = SidecarProcess(command, workers=workers, environ=environ, settings=settings, store=store)
