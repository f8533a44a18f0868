"""How a process of the sidecar's learns that it is to end: by a signal, or by the end of who started it."""

import asyncio
import contextlib
import os
import signal


async def told_to_end(parent_pid: int | None) -> None:
    """Return on SIGTERM, SIGINT, or when the parent has ended; at once where it is gone already."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if parent_pid is None:
        await ended.wait()
        return
    try:
        descriptor = os.pidfd_open(parent_pid)
    except OSError:
        return
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(OSError):
            os.close(descriptor)
