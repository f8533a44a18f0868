"""The helper process of one rank, as its keeper has it: asked, awaited up to a deadline, and killed when that is over.

Owns the process and its two pipes. Invariant: one request at a time, and after `end` the helper has its SIGKILL and is
not listened to any more. What a call means is not known here; the helper itself is
`adapters/cuda_checkpoint/helper.py`.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ...adapters.cuda_checkpoint.driver import DriverError
from ...adapters.cuda_checkpoint.helper import CUDA, LINE_BYTES_MAX

# cuInit on a machine with many cards takes a second or two.
START_S = 20.0
END_S = 5.0


class HelperEnded(Exception):
    """The helper is gone, or was ended because it took too long: what came of its call is not known."""


class RankHelper:
    """One helper. Make it with `started`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._read = b""

    @classmethod
    async def started(
        cls, pid: int, start_ticks: int, *, driver: str = CUDA, lock_fd: int | None = None, within_s: float = START_S
    ) -> "RankHelper":
        """A helper that is ready. DriverError says why there is none."""
        # The driver is to see all cards of the machine, whatever its keeper was told to see.
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            # Without a death signal: what is under way when its keeper dies is to come to its end.
            process = subprocess.Popen(  # noqa: ASYNC220 - a fork
                [
                    sys.executable, "-m", "midstream.adapters.cuda_checkpoint.helper",
                    "--pid", str(pid), "--started", str(start_ticks), "--driver", driver,
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )  # fmt: skip
        except OSError as error:
            raise DriverError("HELPER", f"no helper for process {pid}: {error}") from error
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        helper = cls(process)
        try:
            said = await asyncio.wait_for(helper._answer(), within_s)
        except (TimeoutError, HelperEnded) as error:
            await helper.end()
            raise DriverError("HELPER", f"the helper of process {pid} does not start within {within_s:g} s") from error
        except BaseException:
            await helper.end()
            raise
        if said.get("ready") is not True:
            await helper.end()
            raise DriverError(str(said.get("code")), str(said.get("text")))
        return helper

    @property
    def pid(self) -> int:
        """The helper's own."""
        return self._process.pid

    async def ask(self, op: str, within_s: float, **more: Any) -> Mapping[str, Any]:
        """The answer. DriverError is the driver's own; HelperEnded when there was none in time."""
        request = json.dumps({"op": op, "deadline_s": within_s, **more}).encode() + b"\n"
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(request)
            self._process.stdin.flush()
            answer = await asyncio.wait_for(self._answer(), within_s)
        except (TimeoutError, OSError, ValueError) as error:
            await self.end()
            raise HelperEnded(f"{op} took longer than {within_s:g} s, or its helper is gone") from error
        except HelperEnded:
            await self.end()
            raise
        if answer.get("ok") is not True:
            raise DriverError(str(answer.get("code")), str(answer.get("text")))
        return answer

    async def end(self) -> None:
        """Kill it, whatever it is doing."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        # One that hangs within a driver is left to its fate: its call is no longer waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Also when whoever ends it is ended itself: it is to be collected.
            await asyncio.shield(asyncio.to_thread(self._process.wait, END_S))

    async def _answer(self) -> dict[str, Any]:
        while b"\n" not in self._read:
            if len(self._read) > LINE_BYTES_MAX:
                raise HelperEnded("the helper says more than an answer")
            part = await self._part()
            if not part:
                raise HelperEnded("the helper has ended")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise HelperEnded(f"the helper says what is no answer ({error})") from error
        if not isinstance(answer, dict):
            raise HelperEnded("the helper says what is no answer")
        return answer

    async def _part(self) -> bytes:
        """What the helper says next; nothing at its end."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return b""
        descriptor = self._process.stdout.fileno()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(descriptor, tell)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)
        try:
            return os.read(descriptor, LINE_BYTES_MAX)
        except BlockingIOError:
            return await self._part()
        except OSError:
            return b""
