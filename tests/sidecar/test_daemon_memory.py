"""Tier 1 by the sidecar's settings: what the mover is told, what is shown of it, and that it ends with the sidecar."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from midstream.session.errors import PoolError
from midstream.session.held import HolderClient
from midstream.sidecar.config import Restore, Settings, Tier1
from midstream.sidecar.daemon import _Daemon
from midstream.sidecar.mover.memory_map import NAME

SIZE = 2 << 20


def told(tmp_path: Path, settings: Tier1, tiers: str = "held,memory") -> list[str]:
    """What of its options the mover is told about memory."""
    daemon = _Daemon(Settings(state_dir=str(tmp_path), tier1=settings, restore=Restore(tiers=tiers)), None)
    command = daemon._mover_command()
    return command[command.index("--memory-bytes") :] if "--memory-bytes" in command else []


async def test_the_mover_is_told_what_it_may_have_only_where_it_is_wanted(tmp_path: Path) -> None:
    assert told(tmp_path, Tier1()) == []
    assert told(tmp_path, Tier1(bytes=SIZE), "held,disk") == []
    words = ["--memory-bytes", "2097152", "--memory-bytes-per-s"]
    assert told(tmp_path, Tier1(bytes=SIZE)) == [*words, "10000000000", "--memory-tail-tokens", "0"]
    assert told(tmp_path, Tier1(bytes=SIZE, bandwidth=5_000_000, tail="7")) == [
        *words, "5000000", "--memory-tail-tokens", "7"
    ]  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="midstream-", dir="/dev/shm") as name:
        yield Path(name)


async def test_it_is_shown_counted_and_free_when_the_sidecar_has_ended(folder: Path) -> None:
    # Nobody is there: the sidecar serves without any worker, and that is enough here.
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "serve", "--worker", "http://127.0.0.1:9", "--port", "0"]
    argv += ["--state-dir", str(folder / "state"), "--set", f"tier1.bytes={SIZE}"]
    log = folder / "log"
    with log.open("wb") as sink:
        sidecar = await asyncio.to_thread(subprocess.Popen, argv, stdout=sink, stderr=sink, env=os.environ)
    holder = HolderClient(folder / "state" / "holder.sock")
    try:
        url = await _until_said(log, "event=listening url=")
        async with aiohttp.ClientSession() as http:
            deadline = time.monotonic() + 20
            while True:
                async with http.get(f"{url}/midstream/v1/status") as answer:
                    mover = (await answer.json())["mover"]
                if mover.get("tier1_bytes") or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            assert (mover["tier1_bytes"], mover["tier1_blocks"], mover["tier1_behind_blocks"]) == (SIZE, 0, 0)
            async with http.get(f"{url}/metrics") as answer:
                assert "midstream_mover_tier1_bytes 2.097152e+06" in await answer.text()
        assert [pool.name for pool in await asyncio.to_thread(holder.list)] == [NAME]
    finally:
        sidecar.terminate()
        await asyncio.to_thread(sidecar.wait, 20)
    # A holder that keeps nothing ends, too.
    for _ in range(100):
        try:
            left = await asyncio.to_thread(holder.list)
        except PoolError:
            break
        assert left == []
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the holder has not ended")


async def _until_said(log: Path, words: str) -> str:
    for _ in range(400):
        text = await asyncio.to_thread(log.read_text, errors="replace")
        if words in text:
            return text.split(words)[1].split()[0]
        await asyncio.sleep(0.05)
    raise AssertionError(text)
