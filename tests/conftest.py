"""Engines' environments hold no midstream: what tests start there has it on its path, as `midstream run` does it."""

import os
import tempfile
from pathlib import Path

import pytest

from midstream.sidecar.plugin_path import engine_environ

_ENGINES = ("MIDSTREAM_TEST_TRANSFORMERS_PYTHON", "MIDSTREAM_TEST_VLLM_PYTHON")


def pytest_configure(config: pytest.Config) -> None:
    """Give every process that a test starts the plugin's folder; this interpreter keeps its own path."""
    if any(os.environ.get(name) for name in _ENGINES):
        folder = tempfile.TemporaryDirectory(prefix="midstream-test-plugin-")
        config.add_cleanup(folder.cleanup)
        os.environ["PYTHONPATH"] = engine_environ(Path(folder.name), os.environ)["PYTHONPATH"]
