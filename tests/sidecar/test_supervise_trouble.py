"""A start that breaks half-way is a death like any other: told at once, nothing left, and tried again."""

import asyncio
import errno
import os
import socket
import subprocess
import sys

import pytest

from midstream.sidecar import supervise_run
from midstream.sidecar.process_watch import TreeWatch
from midstream.sidecar.processes import read_process
from midstream.sidecar.supervise import Policy, WorkerState
from midstream.sidecar.supervise_run import Command, EpochDeath, StateChange, Supervised

POLICY = Policy(start_timeout_s=60, stop_timeout_s=5, restart_backoff_s=0.05, restarts_max=0, restarts_window_s=60)


def engine(deaths: list[EpochDeath], states: list[StateChange]) -> Supervised:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"

    async def prepare(epoch: int) -> Command:
        return Command((sys.executable, "-c", "import time; time.sleep(60)"), os.environ, url)

    return Supervised("w-1", prepare, POLICY, on_death=deaths.append, on_state=states.append)


async def failed(supervised: Supervised) -> None:
    async with asyncio.timeout(20):
        while supervised.state is not WorkerState.FAILED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    really_start = supervise_run._start

    def start(command: Command) -> "subprocess.Popen[bytes]":
        popen = really_start(command)
        started.append(popen.pid)
        return popen

    def no_descriptors(watch: TreeWatch) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(supervise_run, "_start", start)
    monkeypatch.setattr(TreeWatch, "start", no_descriptors)
    deaths: list[EpochDeath] = []
    supervised = engine(deaths, [])
    supervised.start()
    await failed(supervised)
    assert "Too many open files" in deaths[0].text
    assert [read_process(pid) for pid in started] == [None]
    await supervised.stop()


async def test_a_child_that_breaks_before_it_runs_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: Command) -> "subprocess.Popen[bytes]":
        raise subprocess.SubprocessError("Exception occurred in preexec_fn.")

    monkeypatch.setattr(supervise_run, "_start", start)
    deaths: list[EpochDeath] = []
    supervised = engine(deaths, [])
    supervised.start()
    await failed(supervised)
    assert "preexec_fn" in deaths[0].text
    await supervised.stop()
