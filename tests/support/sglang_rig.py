"""Real SGLang workers for tests, as the demo starts them."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from midstream.loadtest.harness import SidecarProcess
from midstream.sidecar import plugin_path
from midstream.sidecar.environments import SGLANG_ENVIRON, SGLANG_OPTIONS
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
        self.workers = workers
        self.sidecar = SidecarProcess(command, workers=workers, environ=SGLANG_ENVIRON, settings=settings, store=store)


def run_inside(program: str, folder: Path) -> None:
    """Run a program in SGLang's environment, without a server, and fail with what it says."""
    environ = {**os.environ, **SGLANG_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(folder))}
    told = subprocess.run(
        [sglang_python(), "-c", f"{program}\nprint('done')"],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert told.stdout.splitlines()[-1:] == ["done"], told.stdout[-1000:] + told.stderr[-3000:]
