"""The plugin on a bare Python's path: there, found, and alone."""

import os
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest

from midstream.sidecar.plugin_path import engine_environ, ensure


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def run(python: Path, code: str, environ: dict[str, str]) -> str:
    done = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_bare_python_imports_the_plugin_and_finds_its_entry_point(bare_python: Path, tmp_path: Path) -> None:
    environ = engine_environ(tmp_path, {"PATH": os.environ["PATH"]})
    code = "import midstream.session.arena, midstream.session.marker; print(midstream.session.arena.__name__)"
    assert run(bare_python, code, environ) == "midstream.session.arena"
    code = "from importlib.metadata import entry_points, version; print(version('midstream'),"
    code += " [e.value for g in ('vllm.general_plugins', 'sglang.srt.plugins') for e in entry_points(group=g)])"
    told = run(bare_python, code, environ)
    assert told.endswith("['midstream.adapters.vllm.plugin:register', 'midstream.adapters.sglang.plugin:register']")


def test_nothing_else_of_this_environment_is_on_the_path(bare_python: Path, tmp_path: Path) -> None:
    environ = engine_environ(tmp_path, {"PATH": os.environ["PATH"]})
    code = """
import importlib.util as u
names = ("aiohttp", "zstandard", "pytest", "tests", "midstream.tests", "midstream.docs", "proxy", "adapters")
print([n for n in names if u.find_spec(n)])
"""
    assert run(bare_python, code, environ) == "[]"
    scripts = "from importlib.metadata import entry_points; print(list(entry_points(group='console_scripts')))"
    assert "midstream" not in run(bare_python, scripts, environ)


def test_what_was_on_the_path_stays_there(tmp_path: Path) -> None:
    environ = engine_environ(tmp_path, {"PYTHONPATH": "/a:/b", "X": "1"})
    assert environ["PYTHONPATH"].endswith(":/a:/b")
    assert environ["X"] == "1"


def test_the_folder_is_made_once(tmp_path: Path) -> None:
    first = ensure(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert ensure(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_many_who_make_it_at_once_get_the_same_folder(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(ensure(tmp_path / "deep"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1
    assert [p.name for p in (tmp_path / "deep").iterdir()] == [made[0].name]


def test_it_runs_as_the_interpreter_of_this_environment_too(tmp_path: Path) -> None:
    environ = engine_environ(tmp_path, dict(os.environ))
    code = "import midstream.session as s; print(s.__file__)"
    assert run(Path(sys.executable), code, environ).startswith(str(ensure(tmp_path)))
