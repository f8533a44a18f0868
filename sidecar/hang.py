"""Tells a hung engine from a slow session: has anything at all been journaled on that epoch lately?

A stalled stream alone proves nothing of its engine. An epoch on which sessions are live and none of them got a token
for a while is hung, whatever its health check says.
"""

import asyncio

from ..session.records import SlotState
from .workers import Epoch


def progress(epoch: Epoch) -> tuple[int, int]:
    """Live sessions of an epoch that are past their prefill, and the tokens journaled for all of them."""
    if epoch.arena is None:
        return 0, 0
    lengths = [len(epoch.arena.journal(slot)) for slot in epoch.arena.slots() if slot.state is SlotState.LIVE]
    return sum(1 for n in lengths if n), sum(lengths)


async def is_hung(epoch: Epoch, watch_s: float) -> bool:
    """Watch an epoch for `watch_s`: True if sessions are decoding there and nothing moves."""
    before = progress(epoch)
    await asyncio.sleep(watch_s)
    return not epoch.dead and before[0] > 0 and progress(epoch) == before
