"""How a sidecar begins and ends: told to stop, killed, or never able to start."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from midstream.session.errors import EngineError
from midstream.session.held import HolderClient
from support.sidecars import Sidecar, outcome_of, require_whole, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

BODY = {"prompt": "Let me finish", "temperature": 0, "max_tokens": 500}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_told_to_stop_it_lets_streams_finish_and_leaves_no_engine_behind(
    number: signal.Signals, start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1)
    told: list[int] = []

    def stop(_: object) -> None:
        if not told:
            told.append(sidecar.pid)
            os.kill(sidecar.pid, number)

    answer = await sidecar.stream(http, BODY, stop)
    require_whole(answer)
    assert told
    assert len(answer.token_ids) == BODY["max_tokens"]
    assert outcome_of(answer) == ("undisturbed", 0)
    process = sidecar.process.process
    assert process is not None
    assert await asyncio.to_thread(process.wait, 30) == 0
    assert sidecar.engines() == []


async def test_one_that_was_killed_leaves_no_engine_and_the_next_one_takes_its_place(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1)
    [holder] = sidecar.holders()
    wanted = await sidecar.stream(http, BODY)
    killed: list[int] = []

    def kill(_: object) -> None:
        if not killed:
            killed.append(sidecar.pid)
            os.kill(sidecar.pid, signal.SIGKILL)

    broken = await sidecar.stream(http, BODY, kill)
    assert broken.violations, "a client whose sidecar is gone sees it"
    assert wanted.text.startswith(broken.text)
    process = sidecar.process.process
    assert process is not None
    await asyncio.to_thread(process.wait, 10)

    async def no_engine(_: aiohttp.ClientSession) -> bool:
        return not sidecar.engines()

    await until(no_engine, http)
    assert [p.pid for p in sidecar.holders()] == [holder.pid], "the holder outlives it"
    await sidecar.process.start(http, timeout_s=90)
    again = await sidecar.stream(http, BODY)
    require_whole(again)
    assert again.same_as(wanted)
    assert [p.pid for p in sidecar.holders()] == [holder.pid]
    # Nothing of the first life is kept.
    pools = {pool.name for pool in HolderClient(sidecar.process.state_dir / "holder.sock").list()}
    assert pools == {"worker-0/1/0"}


def midstream(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    argv = [sys.executable, "-m", "midstream.sidecar.cli", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_named(command: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = midstream("run", "--port", str(port), "--state-dir", str(tmp_path / "s"), "--", *command)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = midstream("run", "--port", "0", "--state-dir", str(tmp_path / "s"), "--", "vlllm", "serve", "m")
    assert done.returncode == 2
    assert "vlllm: no such command on the path" in done.stderr


def test_a_typo_in_the_configuration_is_named_with_its_place(command: list[str], tmp_path: Path) -> None:
    config = tmp_path / "midstream.yaml"
    config.write_text("proxy:\n  keepalive: 3\nlisten: {port: 0}\n")
    done = midstream("run", "--config", str(config), "--state-dir", str(tmp_path / "s"), "--", *command)
    assert done.returncode == 2
    assert "midstream.yaml: proxy.keepalive: unknown setting; did you mean proxy.keepalive_s?" in done.stderr


def test_a_state_folder_that_cannot_be_made_is_named(command: list[str]) -> None:
    done = midstream("run", "--port", "0", "--state-dir", "/proc/none/state", "--", *command)
    assert done.returncode == 2
    assert "state_dir /proc/none/state: " in done.stderr
    assert "choose a folder that you may write to" in done.stderr


def test_an_engine_that_cannot_start_is_given_up_and_says_why(command: list[str]) -> None:
    once = {"supervise.restarts_max": 0, "supervise.restarts_window_s": 60}
    sidecar = Sidecar([*command, "--dtype", "int3"], workers=1, settings=once)
    with pytest.raises(EngineError, match="a worker has failed:") as failed:
        sidecar.start()
    assert "invalid choice: 'int3'" in str(failed.value)
