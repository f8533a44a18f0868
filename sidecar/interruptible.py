"""Long work of a command, ended in good order by a signal.

Owns which signals end it: SIGTERM, SIGHUP and SIGINT, but for those that whoever started the command had it ignore (a
shell's background job, `nohup`). Invariant: the work is cancelled, never dropped, so that what it started ends with it.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end and return what the work returns, also when it was cancelled and returned all the same.

    Raises KeyboardInterrupt where it was ended by a signal and has nothing to return.
    """
    try:
        return asyncio.run(_heeding_signals(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _heeding_signals(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    return await task
