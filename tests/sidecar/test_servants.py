"""Holder and mover are real processes here, and are killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from midstream.session.errors import MidstreamError, PoolError
from midstream.session.held import create_host_pool, map_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.sidecar import servants
from midstream.sidecar.servants import HolderKeeper, MoverKeeper

POOL_BYTES = 4096
OWNER = """
import mmap, os, sys, time
fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
import fcntl
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
os.pwrite(fd, b"the KV of a live engine", 0)
print(fd, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servants, "CHECK_EVERY_S", 0.05)


def meta(pid: int, fd: int) -> dict[str, Any]:
    layout = PoolLayout(1, 4, (Plane(0, POOL_BYTES, POOL_BYTES),))
    return PoolMeta(POOL_BYTES, layout, layout.fingerprint(), {"pid": pid, "fd": fd}).to_json()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextmanager
def owner() -> Iterator[tuple[int, int]]:
    """A live engine's process with a pool: pid and descriptor there."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class Holding:
    """A keeper and the holder that it keeps."""

    def __init__(self, folder: Path) -> None:
        self.restarts = 0
        self.keeper = HolderKeeper(folder / "holder.sock", on_restart=self.count)

    def count(self) -> None:
        self.restarts += 1

    def kill(self) -> None:
        assert self.keeper.pid is not None
        os.kill(self.keeper.pid, signal.SIGKILL)

    def names(self) -> list[str]:
        try:
            return [pool.name for pool in self.keeper.client.list()]
        except PoolError:
            return []


@asynccontextmanager
async def holding(folder: Path) -> AsyncIterator[Holding]:
    held = Holding(folder)
    await held.keeper.ensure()
    keeping = asyncio.create_task(held.keeper.keep())
    try:
        yield held
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        held.kill()
        process = held.keeper._process
        assert process is not None
        process.wait()


async def test_a_killed_holder_is_replaced_and_gets_the_pools_of_live_engines_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with holding(tmp_path) as held:
        with owner() as (pid, fd):
            kept = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            held.keeper.client.put("w0/1/0", kept, meta(pid, fd))
            os.close(kept)
            gone = create_host_pool(POOL_BYTES)
            held.keeper.client.put("w1/1/0", gone, meta(2**22 + 1, 7))
            os.close(gone)
            for name in ("w0/1/0", "w1/1/0"):
                await held.keeper.learn(name)
            first = held.keeper.pid
            held.kill()
            await until(lambda: held.names() == ["w0/1/0"])
            assert (held.restarts, held.keeper.pid != first) == (1, True)
            found, told = held.keeper.client.get("w0/1/0")
            memory = map_pool(found, POOL_BYTES)
            os.close(found)
            assert memory[:6] == b"the KV"
            assert told == meta(pid, fd)
            memory.close()
            # The other engine is dead: its memory went with the holder, which is said, once.
            await until(lambda: "event=pool_lost pool=w1/1/0" in caplog.text)


async def test_a_pool_that_was_let_go_is_not_rescued(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        with owner() as (pid, fd):
            kept = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            held.keeper.client.put("w0/1/0", kept, meta(pid, fd))
            os.close(kept)
            await held.keeper.learn("w0/1/0")
            held.keeper.forget("w0/1/0")
            assert held.names() == []
            held.kill()
            await until(lambda: held.restarts == 1)
            await asyncio.sleep(0.2)
            assert held.names() == []


async def test_a_holder_that_answers_is_used_and_none_is_started(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        other = HolderKeeper(held.keeper.socket, on_restart=lambda: None)
        await other.ensure()
        assert other.pid is None


async def test_a_pool_that_nobody_holds_is_forgotten_without_an_error(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        await held.keeper.learn("w9/9/0")
        held.keeper.forget("w9/9/0")
        assert held.names() == []
    # Nor does a holder that is gone stop anybody from letting go.
    held.keeper.forget("w9/9/0")


async def test_a_holder_that_cannot_start_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "holder.sock").write_text("not a socket")
    keeper = HolderKeeper(tmp_path / "holder.sock", on_restart=lambda: None)
    with pytest.raises(MidstreamError, match=r"holder\.sock does not start"):
        await keeper.ensure()


def mover_command(folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "midstream.sidecar.mover",
        "--socket", str(folder / "mover.sock"), "--holder", str(folder / "holder.sock"),
    ]  # fmt: skip


async def test_a_killed_mover_is_started_again_and_told_only_when_it_answers(tmp_path: Path) -> None:
    answered: list[bool] = []
    path = tmp_path / "mover.sock"

    async def answers() -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    checks: list[asyncio.Task[None]] = []

    async def check() -> None:
        answered.append(await answers())

    keeper = MoverKeeper(mover_command(tmp_path), path, on_start=lambda: checks.append(asyncio.create_task(check())))
    await keeper.ensure()
    keeping = asyncio.create_task(keeper.keep())
    try:
        await until(lambda: answered == [True])
        first = keeper.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(answered) == 2)
        assert answered == [True, True]
        assert (keeper.restarts, keeper.pid != first) == (1, True)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, *checks, return_exceptions=True)
        await asyncio.to_thread(keeper.stop)
    assert not await answers()


async def test_a_mover_that_dies_at_its_start_is_an_error_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = MoverKeeper([sys.executable, "-c", "exit(3)"], tmp_path / "mover.sock", on_start=lambda: None)
    with pytest.raises(MidstreamError, match=r"mover\.sock does not start"):
        await keeper.ensure()
    keeping = asyncio.create_task(keeper.keep())
    try:
        await until(lambda: keeper.restarts >= 2)
        assert "event=mover_start" in caplog.text
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(keeper.stop)


async def test_a_stale_socket_is_no_sign_of_a_mover(tmp_path: Path) -> None:
    path = tmp_path / "mover.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    keeper = MoverKeeper([sys.executable, "-c", "exit(3)"], path, on_start=lambda: None)
    with pytest.raises(MidstreamError, match="does not start"):
        await keeper.ensure()
