"""Holder and mover that take longer to come up than they are waited for: what was to follow still follows."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.session.errors import MidstreamError, PoolError
from midstream.session.held import create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.sidecar import servants
from midstream.sidecar.servants import HolderKeeper, MoverKeeper

POOL_BYTES = 4096
SLOW_MOVER = """
import socket, sys, time
time.sleep(0.6)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servants, "CHECK_EVERY_S", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_mover_that_answers_late_is_told_what_to_follow_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servants, "MOVER_START_TIMEOUT_S", 0.1)
    starts: list[int] = []
    path = tmp_path / "mover.sock"
    keeper = MoverKeeper([sys.executable, "-c", SLOW_MOVER, str(path)], path, on_start=lambda: starts.append(1))
    with pytest.raises(MidstreamError, match="does not start"):
        await keeper.ensure()
    first = keeper.pid
    keeping = asyncio.create_task(keeper.keep())
    try:
        await until(lambda: bool(starts))
        await asyncio.sleep(0.2)
        assert (starts, keeper.restarts, keeper.pid) == ([1], 0, first)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(keeper.stop)


async def test_a_holder_that_answers_late_gets_the_pools_of_live_engines_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[int] = []
    keeper = HolderKeeper(tmp_path / "holder.sock", on_restart=lambda: restarts.append(1))
    await keeper.ensure()
    pool = create_host_pool(POOL_BYTES)
    layout = PoolLayout(1, 4, (Plane(0, POOL_BYTES, POOL_BYTES),))
    owner = {"pid": os.getpid(), "fd": pool}
    keeper.client.put("w0/1/0", pool, PoolMeta(POOL_BYTES, layout, layout.fingerprint(), owner).to_json())
    await keeper.learn("w0/1/0")

    def names() -> list[str]:
        try:
            return [held.name for held in keeper.client.list()]
        except PoolError:
            return []

    monkeypatch.setattr(servants, "START_TIMEOUT_S", 0.001)
    keeping = asyncio.create_task(keeper.keep())
    try:
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        await until(lambda: bool(restarts))
        await until(lambda: names() == ["w0/1/0"])
        assert restarts == [1]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        os.close(pool)
        process = keeper._process
        assert process is not None
        process.kill()
        process.wait()
