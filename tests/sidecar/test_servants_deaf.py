"""Holder and mover that live and cannot be asked: stopped, or without their sockets. Others take their places."""

import asyncio
import os
import resource
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from midstream.session.errors import PoolError
from midstream.session.held import create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.sidecar import servants
from midstream.sidecar.servants import HolderKeeper, MoverKeeper

POOL_BYTES = 4096
POOL = "w0/1/0"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servants, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(servants, "DEAF_S", 0.3)
    monkeypatch.setattr(servants, "START_TIMEOUT_S", 3.0)
    monkeypatch.setattr(servants, "ANSWER_TIMEOUT_S", 0.5)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def names(keeper: HolderKeeper) -> list[str]:
    try:
        return [held.name for held in keeper.client.list()]
    except PoolError:
        return []


@asynccontextmanager
async def kept(keeper: HolderKeeper | MoverKeeper) -> AsyncIterator[None]:
    """The keeper looks after its process within."""
    keeping = asyncio.create_task(keeper.keep())
    try:
        yield
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if keeper._process is not None:
            keeper._process.kill()
            keeper._process.wait()


def put_pool(keeper: HolderKeeper) -> int:
    """Have the holder keep a pool of this process; its descriptor."""
    pool = create_host_pool(POOL_BYTES)
    layout = PoolLayout(1, 4, (Plane(0, POOL_BYTES, POOL_BYTES),))
    owner = {"pid": os.getpid(), "fd": pool}
    keeper.client.put(POOL, pool, PoolMeta(POOL_BYTES, layout, layout.fingerprint(), owner).to_json())
    return pool


def stop(keeper: HolderKeeper) -> None:
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGSTOP)


def remove_folder(keeper: HolderKeeper) -> None:
    shutil.rmtree(keeper.socket.parent)


@pytest.mark.parametrize("harm", [stop, remove_folder])
async def test_a_deaf_holder_is_killed_and_another_gets_its_pools(
    harm: Callable[[HolderKeeper], None], tmp_path: Path
) -> None:
    keeper = HolderKeeper(tmp_path / "state" / "holder.sock", on_restart=lambda: None)
    keeper.socket.parent.mkdir()
    await keeper.ensure()
    pool = put_pool(keeper)
    await keeper.learn(POOL)
    first = keeper._process
    async with kept(keeper):
        harm(keeper)
        await until(lambda: keeper._process is not first and names(keeper) == [POOL])
        assert first is not None
        assert first.wait(1) == -signal.SIGKILL, "two holders would keep the memory twice"
    os.close(pool)


async def test_a_deaf_holder_of_a_sidecar_before_is_replaced_too(tmp_path: Path) -> None:
    before = HolderKeeper(tmp_path / "holder.sock", on_restart=lambda: None)
    await before.ensure()
    keeper = HolderKeeper(before.socket, on_restart=lambda: None)
    await keeper.ensure()
    async with kept(keeper):
        stop(before)
        await until(lambda: keeper._process is not None and keeper._answers())
    assert before._process is not None
    assert before._process.wait(1) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["stopped", "no socket"])
async def test_a_deaf_mover_is_killed_and_another_is_told_what_to_follow(how: str, tmp_path: Path) -> None:
    starts: list[int | None] = []
    path = tmp_path / "mover.sock"
    command = [sys.executable, "-m", "midstream.sidecar.mover", "--socket", str(path), "--holder", str(tmp_path / "h")]
    keeper = MoverKeeper(command, path, on_start=lambda: starts.append(keeper.pid))
    await keeper.ensure()
    async with kept(keeper):
        await asyncio.sleep(0.5)
        assert len(starts) == 1
        assert keeper.pid is not None
        if how == "stopped":
            os.kill(keeper.pid, signal.SIGSTOP)
        else:
            path.unlink()
        await until(lambda: len(starts) >= 2)
        assert starts[0] != starts[1]


async def test_without_descriptors_nobody_is_taken_for_dead(tmp_path: Path) -> None:
    restarts: list[int] = []
    keeper = HolderKeeper(tmp_path / "holder.sock", on_restart=lambda: restarts.append(1))
    await keeper.ensure()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [os.open("/dev/null", os.O_RDONLY)]
    async with kept(keeper):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 32, hard))
        try:
            with suppress(OSError):
                while True:
                    used.append(os.open("/dev/null", os.O_RDONLY))
            await asyncio.sleep(0.8)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in used:
                os.close(fd)
        assert restarts == []
