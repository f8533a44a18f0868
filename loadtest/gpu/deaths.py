"""How soon deaths are told of: by a lifeline, and by a pidfd, which waits until the driver has taken the process down.

Owns the measuring of single deaths. What a whole sidecar makes of one is measured by `gap.py`.
"""

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ...session import futex
from ...session.errors import EngineError
from ...session.lifeline import Hold, LifelineFile, create_lifeline

WITHIN_S = 10.0
_HOLD = """
import sys, time
from pathlib import Path
from midstream.session.lifeline import hold_lifeline
hold_lifeline(Path(sys.argv[1]), "probe", on_failure=lambda error: print(error, file=sys.stderr, flush=True))
{code}
print("up", flush=True)
time.sleep(120)
"""
# A context, and memory in it that has been written to.
_ON_A_GPU = """
from midstream.session import vram
from cuda.bindings import driver
pool = vram.create_device_pool(256 << 20, 0)
with vram.current(0):
    assert int(driver.cuMemsetD32(pool.address, 1, pool.size_bytes // 4)[0]) == 0
    assert int(driver.cuCtxSynchronize()[0]) == 0
"""


def on_the_host() -> str:
    """A process without a GPU."""
    return _say(*measure(""))


def on_a_gpu() -> str:
    """A process with a CUDA context and a pool in VRAM."""
    return _say(*measure(_ON_A_GPU))


def _say(told_ms: float, gone_ms: float) -> str:
    return f"told after {told_ms:.2f} ms, gone after {gone_ms:.2f} ms"


def measure(code: str) -> tuple[float, float]:
    """Kill a process that holds a lifeline and ran `code`: when its lifeline broke, and when it was gone, in ms.

    EngineError when the lifeline says nothing.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "1.lifeline"
        create_lifeline(path)
        file = LifelineFile(path)
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD.format(code=code), str(path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "up\n":
                raise EngineError("the process that was to be killed has ended; see its error above")
            word = _held(file)
            pidfd = os.pidfd_open(process.pid)
            killed_s = time.perf_counter()
            process.kill()
            told_s = _told(file, word)
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            waiting.poll(1000 * WITHIN_S)
            gone_s = time.perf_counter()
            os.close(pidfd)
        finally:
            process.kill()
            process.communicate()
            file.close()
    return 1000 * (told_s - killed_s), 1000 * (gone_s - killed_s)


def _held(file: LifelineFile) -> tuple[int, int]:
    deadline_s = time.monotonic() + WITHIN_S
    while not (cells := file.look()):
        if time.monotonic() > deadline_s:
            raise EngineError("nothing holds the lifeline; deaths are told by pidfds alone")
        time.sleep(0.01)
    return cells[0][1:]


def _told(file: LifelineFile, word: tuple[int, int]) -> float:
    deadline_s = time.monotonic() + WITHIN_S
    while file.look()[0][0] is not Hold.BROKEN:
        if time.monotonic() > deadline_s:
            raise EngineError("the kernel did not mark the lifeline; deaths are told by pidfds alone")
        try:
            futex.wait_any([word], WITHIN_S)
        except OSError:  # a kernel without that wait: it is looked at, as a sidecar would
            time.sleep(0.001)
    return time.perf_counter()


class PidfdNews:
    """When a process that was killed is gone, as its pidfd tells this event loop. None until then."""

    def __init__(self, pid: int, killed_s: float) -> None:
        """`killed_s` is on the clock of `time.perf_counter`."""
        self.gone_ms: float | None = None
        self._killed_s = killed_s
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # collected already: nobody can tell
        self._loop.add_reader(self._fd, self._gone)

    def _gone(self) -> None:
        self.gone_ms = 1000 * (time.perf_counter() - self._killed_s)
        self.close()

    def close(self) -> None:
        """Wait for it no more."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
