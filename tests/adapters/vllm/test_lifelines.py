"""Which of vLLM's processes hold a lifeline, with fake engines in real processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.adapters import guard
from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.vllm import lifelines
from midstream.session.lifeline import LifelineFile, create_lifeline

SETTINGS = """
import multiprocessing, sys, time
from pathlib import Path
from midstream.adapters.vllm.lifelines import _with_front_end, hold
from midstream.adapters.plugin_settings import PluginSettings, plugin_settings
settings = PluginSettings("w", 1, Path("holder"), Path(sys.argv[1]), None, 10.0)
"""
CORE = """
def core():
    hold(settings)
    hold(settings)
    print("up", flush=True)
    time.sleep(60)

multiprocessing.get_context("fork").Process(target=core, name="EngineCore", daemon=True).start()
time.sleep(60)
"""
FRONT_END = """
import os
os.environ |= {"MIDSTREAM_WORKER": "w", "MIDSTREAM_HOLDER": "holder", "MIDSTREAM_ARENA": sys.argv[1]}

class AsyncLLM:
    def __init__(self, vllm_config, executor_class, log_stats):
        import threading
        print("threads", threading.active_count(), flush=True)

AsyncLLM.__init__ = _with_front_end(AsyncLLM.__init__)
AsyncLLM(None, None, log_stats=False)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "first_line", "name"), [(CORE, "up\n", "EngineCore"), (FRONT_END, "threads 1\n", "front end")]
)
def test_a_core_holds_one_under_its_name_and_a_front_end_when_its_engine_is_up(
    tmp_path: Path, code: str, first_line: str, name: str
) -> None:
    create_lifeline(tmp_path / "1.lifeline")
    file = LifelineFile(tmp_path / "1.lifeline")
    command = [sys.executable, "-c", SETTINGS + code, str(tmp_path / "1.arena")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout is not None
            assert popen.stdout.readline() == first_line
            deadline_s = time.monotonic() + 10
            while not file.look():
                assert time.monotonic() < deadline_s, "nothing holds it"
                time.sleep(0.01)
            assert [file.holder(address).name for _, address, _ in file.look()] == [name]
        finally:
            popen.kill()
    file.close()


def test_an_engine_without_an_arena_holds_none_and_what_goes_wrong_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def fails(path: Path, name: str, *, on_failure: object) -> None:
        asked.append(path)
        raise OSError("out of luck")

    monkeypatch.setattr(lifelines, "hold_lifeline", fails)
    monkeypatch.setattr(guard, "_on_error", [])
    lifelines.hold(None)
    lifelines.hold(PluginSettings("w", 1, tmp_path, None, None, 10.0))
    assert asked == []
    lifelines.hold(PluginSettings("w", 1, tmp_path, tmp_path / "7.arena", None, 10.0))
    assert asked == [tmp_path / "7.lifeline"]
