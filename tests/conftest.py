"""What engines' tests share: the plugin on the path of what they start, a pair of vLLMs, and who runs where.

Engines' environments hold no midstream: what tests start there has it on its path, as `midstream run` does it.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.sidecar.plugin_path import engine_environ
from support.vllm_rig import Rig

_ENGINES = ("MIDSTREAM_TEST_TRANSFORMERS_PYTHON", "MIDSTREAM_TEST_VLLM_PYTHON")


def pytest_configure(config: pytest.Config) -> None:
    """Give every process that a test starts the plugin's folder; this interpreter keeps its own path."""
    if any(os.environ.get(name) for name in _ENGINES):
        folder = tempfile.TemporaryDirectory(prefix="midstream-test-plugin-")
        config.add_cleanup(folder.cleanup)
        os.environ["PYTHONPATH"] = engine_environ(Path(folder.name), os.environ)["PYTHONPATH"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests run in two processes, one takes those of vLLM, which are half of the time, and the other the files.

    Two pairs of vLLMs at once are more than two cores can do in good time.
    """
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        group = "vllm" if item.get_closest_marker("vllm") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    # Stable: groups are handed out in the order in which they come up, and the longest has to begin first.
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)


@pytest.fixture(scope="session")
def vllm_pair() -> Iterator[Rig]:
    """A sidecar with two vLLM workers for all tests that need nothing else: a start of vLLM is what costs time.

    They prefill at most 64 tokens a step, so that a long prompt takes several and a death can come between them.
    """
    rig = Rig("--max-num-batched-tokens", "64", workers=2)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
