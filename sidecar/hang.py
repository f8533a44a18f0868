"""Tells a hung engine from a slow session: has anything at all been journaled on that epoch lately?

A stalled stream alone proves nothing of its engine. An epoch on which sessions are live and none of them got a token
for a while is hung, whatever its health check says. And so is one whose front end takes no request: a session that
was given to it waits for ever.
"""

import asyncio

import aiohttp

from ..session.records import SlotState
from .workers import Epoch

LOOK_EVERY_S = 0.5


def progress(epoch: Epoch) -> tuple[int, int]:
    """Live sessions of an epoch that are past their prefill, and the tokens journaled for all of them.

    What a resumed session re-entered is no progress: it may be waiting for its KV, or computing it again.
    """
    if epoch.arena is None:
        return 0, 0
    live = [slot for slot in epoch.arena.slots() if slot.state is SlotState.LIVE]
    own = [len(epoch.arena.journal(slot)) - slot.resumed for slot in live]
    return sum(1 for n in own if n > 0), sum(own)


async def is_hung(epoch: Epoch, watch_s: float) -> bool:
    """Watch an epoch for `watch_s`: True if sessions are decoding there and nothing moves."""
    before = progress(epoch)
    until_s = asyncio.get_running_loop().time() + watch_s
    while not epoch.dead and before[0] > 0 and progress(epoch) == before:
        left_s = until_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return True
        await asyncio.sleep(min(left_s, LOOK_EVERY_S))
    return False


async def is_deaf(url: str, watch_s: float) -> bool:
    """Whether an engine takes a connection and answers nothing within `watch_s`, not even to a health check.

    Whoever refuses the connection is dead or dying, and that is told by the kernel.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=watch_s)) as http,
            http.get(f"{url}/health"),
        ):
            return False
    except TimeoutError:
        return True
    except (aiohttp.ClientError, OSError):
        return False
