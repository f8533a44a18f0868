"""The measuring of single deaths, without a GPU."""

import asyncio
import subprocess
import sys
import time

import pytest

from midstream.loadtest.gpu import deaths
from midstream.loadtest.gpu.deaths import PidfdNews
from midstream.session.errors import EngineError


def test_a_lifeline_tells_before_the_process_is_gone() -> None:
    told_ms, gone_ms = deaths.measure("memory = bytearray(1 << 28)\nfor at in range(0, 1 << 28, 4096): memory[at] = 1")
    assert 0 < told_ms < gone_ms
    assert deaths.on_the_host().startswith("told after ")


def test_a_process_that_holds_nothing_is_an_error_and_not_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "WITHIN_S", 0.3)
    monkeypatch.setattr(deaths, "_HOLD", "import time\n{code}\nprint('up', flush=True)\ntime.sleep(60)")
    with pytest.raises(EngineError, match="nothing holds the lifeline"):
        deaths.measure("")
    monkeypatch.setattr(deaths, "_HOLD", "{code}")
    with pytest.raises(EngineError, match="has ended"):
        deaths.measure("")


def sleeping() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


async def test_when_a_process_is_gone_is_told_by_its_pidfd_and_not_before() -> None:
    popen = sleeping()
    news = PidfdNews(popen.pid, time.perf_counter())
    await asyncio.sleep(0.1)
    assert news.gone_ms is None
    popen.kill()
    async with asyncio.timeout(10):
        while news.gone_ms is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert news.gone_ms > 90
    popen.wait()
    assert PidfdNews(popen.pid, 0.0).gone_ms is None
    news.close()
