"""Processes that hold a lifeline, and when their deaths are told of."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOLD = """
import sys, time, threading, os, signal
from pathlib import Path
from midstream.session.lifeline import hold_lifeline

def failed(error):
    print(f"failed: {error}", flush=True)

hold_lifeline(Path(sys.argv[1]), "core", on_failure=failed)
"""
SLEEP = "\nprint('up', flush=True)\ntime.sleep(60)\n"


def holding(path: Path, code: str = SLEEP) -> "subprocess.Popen[str]":
    """A process that holds a cell of a file and then runs `code`, of which the first line that it prints is read."""
    popen = subprocess.Popen(
        [sys.executable, "-c", HOLD + code, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert popen.stdout is not None
    popen.stdout.readline()
    return popen


@contextmanager
def all_ended() -> "Iterator[Callable[..., subprocess.Popen[str]]]":
    """`holding`, all of whose processes, and what they have forked, are ended and collected."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, code: str = SLEEP) -> "subprocess.Popen[str]":
        started.append(popen := holding(path, code))
        return popen

    try:
        yield start
    finally:
        for popen in started:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            ended(popen)


def ended(popen: "subprocess.Popen[str]") -> int:
    """Kill and collect it."""
    popen.kill()
    assert popen.stdout is not None
    popen.stdout.close()
    return popen.wait()


class PidfdClock:
    """When a process's pidfd says that it is gone."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def gone_at(self, within_s: float = 20.0) -> float:
        """On the monotonic clock."""
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        assert waiting.poll(within_s * 1000), "it did not end"
        at_s = time.perf_counter()
        os.close(self._fd)
        return at_s
