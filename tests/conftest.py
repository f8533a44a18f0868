"""What engines' tests share: the plugin on the path of what they start, a pair of vLLMs, and who runs where.

Engines' environments hold no midstream: what tests start there has it on its path, as `midstream run` does it.
"""

import contextlib
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.sidecar.plugin_path import engine_environ

# Before any of it is imported: so that its assertions tell what they compared.
pytest.register_assert_rewrite("support")

from support import forking  # noqa: E402
from support.parsing import nothing_is_collected  # noqa: E402
from support.sglang_rig import COMPACT, SglangRig  # noqa: E402
from support.sglang_rig import PYTHON_VARIABLE as SGLANG_PYTHON  # noqa: E402
from support.vllm_rig import PYTHON_VARIABLE as VLLM_PYTHON  # noqa: E402
from support.vllm_rig import Rig, whole_model  # noqa: E402

# Engines whose pair is shared: what tests of one are, is one part.
VLLM, SGLANG = PAIRS = ("vllm", "sglang")
_ENGINES = ("MIDSTREAM_TEST_TRANSFORMERS_PYTHON", SGLANG_PYTHON, VLLM_PYTHON)


# What failed, for the last lines of the output: all that is kept of it in some places.
_failed: list[str] = []
_TOLD_OF_EACH = 400
_TOLD = 3000


def pytest_configure(config: pytest.Config) -> None:
    """Give every process that a test starts the plugin's folder; this interpreter keeps its own path."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        # How long an example takes is no property of what is tested, and engines run beside it.
        settings.register_profile("beside engines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("beside engines")
    if any(os.environ.get(name) for name in _ENGINES):
        folder = tempfile.TemporaryDirectory(prefix="midstream-test-plugin-")
        config.add_cleanup(folder.cleanup)
        os.environ["PYTHONPATH"] = engine_environ(Path(folder.name), os.environ)["PYTHONPATH"]
        if os.environ.get(VLLM_PYTHON) or os.environ.get(SGLANG_PYTHON):
            ours = tempfile.TemporaryDirectory(prefix="midstream-test-forking-")
            config.add_cleanup(ours.cleanup)
            forking.plant(Path(ours.name))
            os.environ["PYTHONPATH"] += os.pathsep + ours.name


def _part(nodeid: str) -> str:
    """What goes to one process as a whole, where tests run in two: all of vLLM, all of SGLang, or a file.

    Two pairs of vLLMs at once are more than two cores can do in good time.
    """
    file = nodeid.partition("::")[0]
    for engine in PAIRS:
        if file.startswith(f"tests/adapters/{engine}/") or f"[{engine}" in nodeid:
            return engine
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Any:
    """Hands out parts in the order in which they come up, where tests are shared out between processes."""
    # Only where it is used: machines with a GPU need not have it.
    from xdist.scheduler import LoadScopeScheduling

    class ByPart(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _part(nodeid)

    return ByPart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest parts begin first, and end with those who share a pair, which idles for nobody else then."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        part = _part(item.nodeid)
        shares = f"{part}_pair" in getattr(item, "fixturenames", ()) or f"[{part}" in item.nodeid
        return PAIRS.index(part) if part in PAIRS else len(PAIRS), shares

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is told with its source, which is parsed."""
    with nothing_is_collected():
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what failed."""
    if report.failed:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr)
        _failed.append(f"{report.nodeid} ({report.when}, {report.duration:.0f} s): {reason}"[:_TOLD_OF_EACH])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Tell what failed once more, in few words."""
    if _failed and not hasattr(config, "workerinput"):
        print("\n".join(["what failed:", *_failed])[:_TOLD], flush=True)


@pytest.fixture(scope="session")
def vllm_pair() -> Iterator[Rig]:
    """A sidecar with two vLLM workers for all tests that need nothing else: a start of vLLM is what costs time.

    They prefill at most 64 tokens a step, so that a long prompt takes several and a death can come between them.
    """
    # What dies in one kill is to be admitted before the first of it comes to its cut: this model takes its time.
    rig = Rig("--max-num-batched-tokens", "64", workers=2, model=whole_model())
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@pytest.fixture(scope="session")
def sglang_pair() -> Iterator[Rig]:
    """The same of SGLang: a long prompt takes several steps."""
    rig = SglangRig(*COMPACT, "--chunked-prefill-size", "128", workers=2)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
