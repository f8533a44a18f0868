"""Long work of a command is ended in good order by signals, also in a background job, where SIGINT is ignored."""

import signal
import subprocess
import sys
from signal import Signals

import pytest

RUN = """
import asyncio, signal, sys
from midstream.sidecar.interruptible import run_interruptible

if "background" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

async def work():
    try:
        print("begun", flush=True)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if "stubborn" not in sys.argv:
            raise
        return "what was found"
    finally:
        print("ended", flush=True)

try:
    print(run_interruptible(work()))
except KeyboardInterrupt:
    print("interrupted")
"""


def ended_by(numbers: tuple[Signals, ...], *how: str) -> list[str]:
    process = subprocess.Popen([sys.executable, "-c", RUN, *how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in numbers:
            process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    return rest.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_in_good_order(number: Signals) -> None:
    assert ended_by((number,)) == ["ended", "interrupted"]


def test_what_the_work_still_returns_is_not_lost() -> None:
    assert ended_by((signal.SIGTERM,), "stubborn") == ["ended", "what was found"]


def test_a_background_job_ignores_sigint_as_it_was_told_and_heeds_sigterm() -> None:
    assert ended_by((signal.SIGINT, signal.SIGTERM), "background") == ["ended", "interrupted"]
