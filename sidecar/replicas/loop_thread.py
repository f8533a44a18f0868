"""An event loop in a thread of its own, for stores whose contract is calls that return, and whose network is asyncio.

Invariant: a call ends within its time, whatever the loop does.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SETTLE_S = 0.05


class LoopThread:
    """Runs coroutines for other threads, until closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What the coroutine returns or raises; TimeoutError when it takes longer, and then it is cancelled."""
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the loop was closed")
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result(timeout_s)
        except concurrent.futures.TimeoutError:
            running.cancel()
            raise TimeoutError(f"not done within {timeout_s:g} s") from None

    def close(self) -> None:
        """End the loop, and with it whatever still runs there."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    # Connections that were closed say so to their sockets in the loop's next rounds.
    await asyncio.sleep(SETTLE_S)
