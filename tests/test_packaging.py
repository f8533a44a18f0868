"""What is installed: exactly the packages, and a command that says what it lacks."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "loadtest", "proxy", "session", "sidecar")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build folder in the checkout would let files of yesterday in."""
    copy = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [built] = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", str(wheel)]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, check=False)


def folders() -> set[str]:
    """The packages that are on the disk, as they are imported."""
    return {
        "midstream." + ".".join(path.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for path in (ROOT / name).rglob("__init__.py")
    }


def test_the_list_of_packages_is_what_is_on_the_disk() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders()


def test_every_package_says_that_it_is_typed_and_every_folder_with_code_is_a_package() -> None:
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path
            assert (path.parent / "py.typed").is_file(), path


def test_nothing_at_the_root_could_be_taken_for_a_package() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_the_package_itself_has_no_dependencies() -> None:
    assert PROJECT["project"]["dependencies"] == []


def test_the_libraries_that_the_command_looks_for_are_those_of_the_extra() -> None:
    from midstream.sidecar.cli import LIBRARIES

    imported_as = {"prometheus-client": "prometheus_client", "PyYAML": "yaml"}
    asked = {line.split(">")[0] for line in PROJECT["project"]["optional-dependencies"]["sidecar"]}
    assert set(LIBRARIES) == {imported_as.get(name, name) for name in asked}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"midstream/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert held == expected


def test_a_bare_installation_says_what_the_command_lacks(bare: Path) -> None:
    done = run(bare / "midstream", "--help")
    assert done.returncode == 2
    assert 'pip install ".[sidecar]"' in done.stderr
    assert done.stdout == ""


def test_a_bare_installation_carries_the_plugin(bare: Path) -> None:
    code = (
        "from importlib.metadata import entry_points;"
        "[point] = entry_points(group='vllm.general_plugins');"
        "point.load()();"  # without a sidecar it does nothing
        "import midstream.session.arena, sys; print(point.value, 'aiohttp' in sys.modules)"
    )
    done = run(bare / "python", "-c", code)
    assert done.stdout.strip() == "midstream.adapters.vllm.plugin:register False", done.stderr


def test_installing_puts_nothing_beside_midstream_itself(bare: Path) -> None:
    [site] = (bare.parent / "lib").glob("python3*/site-packages")
    assert {path.name.partition("-")[0] for path in site.iterdir()} <= {"midstream", "__pycache__"}
