"""Comments that keep a client's connection alive while its session waits for another worker.

Invariant: comments only, each written in one piece, so that they can never split an event. It does not know when the
waiting is over: whoever started it stops it.
"""

import asyncio
from collections.abc import Awaitable, Callable

from .sse import encode_comment

COMMENT = encode_comment("waiting")


class Waiting:
    """A small task that writes a comment now and then."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], *, first_s: float, every_s: float) -> None:
        self._write = write
        self._first_s = first_s
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless begun already."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; nothing is written after this returns."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        wait_s = self._first_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._every_s
            try:
                await self._write(COMMENT)
            except ConnectionError:
                return  # the client is gone; the handler learns of it by itself
