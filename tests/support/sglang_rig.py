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
DETERMINISTIC, SERIAL = "--enable-deterministic-inference", "--disable-overlap-schedule"
START_S = 240.0
FORKED = {forking.VARIABLE: "1"}
# A model that has nothing to say would fill an object with blanks for ever.
COMPACT = ("--constrained-json-disable-any-whitespace",)


def sglang_python() -> str:
    """The interpreter of SGLang's environment; skips the test where this machine has none."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no SGLang; `make test` sets it")
    return python


def sglang_command(
    *options: str, model: Path | None = None, deterministic: bool = True, overlapped: bool = False
) -> list[str]:
    """The command of one small worker, of the demo's model if of no other.

    One that is not deterministic has a prefix cache, and draws as it likes; `overlapped` is how SGLang schedules if it
    is not told otherwise.
    """
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model or whole_model())]
    left_out = {DETERMINISTIC: not deterministic, SERIAL: overlapped}
    ours = [option for option in SGLANG_OPTIONS if not left_out.get(option)]
    return [*command, "--served-model-name", "smollm2", *ours, *options]


class SglangRig(Rig):
    """One sidecar and its SGLang workers; `spawned` ones start as users' do, which takes three times as long."""

    def __init__(
        self,
        *options: str,
        workers: int,
        settings: Mapping[str, object] | None = None,
        model: Path | None = None,
        store: Path | None = None,
        environ: Mapping[str, str] | None = None,
        deterministic: bool = True,
        overlapped: bool = False,
        spawned: bool = False,
    ) -> None:
        command = sglang_command(*options, model=model, deterministic=deterministic, overlapped=overlapped)
        environ = {**SGLANG_ENVIRON, **({} if spawned else FORKED), **(environ or {})}
        self.workers = workers
        self.sidecar = SidecarProcess(command, workers=workers, environ=environ, settings=settings, store=store)
