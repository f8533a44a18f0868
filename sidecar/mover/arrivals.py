"""Which sessions have come to an arena: one look at all its slots for everybody who waits there.

Many restores wait at once for the same engine to admit their sessions. So there is one that looks for each arena where
anybody waits, twice a millisecond at first, and it wakes only those whose session has come. Invariant: whoever waits is
told within his time, and what he is told was in the arena at the time of a look. Belongs to one event loop.
"""

import asyncio
import time
from dataclasses import dataclass, field

from ...session.arena import ArenaReader, LoadState, Slot, SlotState
from ...session.ids import SessionId
from .protocol import MoverError, Reason

POLL_S = 0.0005
POLL_SLOW_S = 0.005
POLL_FAST_FOR_S = 1.0
# That an engine goes on without waiting is read from a journal, which costs more than a look: once in so many looks.
JOURNAL_EVERY = 10


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A session that somebody waits for; the future is done when it waits for its KV, or never will."""

    session: SessionId
    generation: int
    began: float
    deadline: float
    came: "asyncio.Future[Slot]"


@dataclass(slots=True)
class _Watch:
    """Everybody who waits at one arena."""

    awaited: list[_Awaited] = field(default_factory=list)
    looking: "asyncio.Task[None] | None" = None


class Arrivals:
    """Waits for sessions to come to arenas and to wait there for their KV."""

    def __init__(self) -> None:
        self._watches: dict[ArenaReader, _Watch] = {}

    async def waiting(self, reader: ArenaReader, session: SessionId, generation: int, deadline: float) -> Slot:
        """The slot of a session's generation, once its engine waits there. Raises MoverError when it never will."""
        came: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        one = _Awaited(session, generation, time.monotonic(), deadline, came)
        watch = self._watches.setdefault(reader, _Watch())
        watch.awaited.append(one)
        if watch.looking is None:
            watch.looking = asyncio.create_task(self._look(reader, watch))
        return await came

    async def _look(self, reader: ArenaReader, watch: _Watch) -> None:
        looks = 0
        try:
            while True:
                now = time.monotonic()
                reader.look()
                for one in watch.awaited:
                    if not one.came.done():
                        self._judge(reader, one, now, journal=looks % JOURNAL_EVERY == 0)
                watch.awaited = [one for one in watch.awaited if not one.came.done()]
                if not watch.awaited:
                    return
                looks += 1
                fast = now - max(one.began for one in watch.awaited) < POLL_FAST_FOR_S
                await asyncio.sleep(POLL_S if fast else POLL_SLOW_S)
        except Exception as error:
            # Whoever waits must be told, whatever is in the arena.
            for one in watch.awaited:
                if not one.came.done():
                    one.came.set_exception(error)
        finally:
            for one in watch.awaited:
                one.came.cancel()
            del self._watches[reader]

    def _judge(self, reader: ArenaReader, one: _Awaited, now: float, *, journal: bool) -> None:
        slot = reader.seen(one.session, one.generation)
        if slot is not None and slot.state is not SlotState.FREE:
            if slot.state is not SlotState.LIVE:
                text = f"session {one.session}: it ended in its new engine"
                one.came.set_exception(MoverError(Reason.GONE, text))
                return
            if slot.load is LoadState.WAITING:
                one.came.set_result(slot)
                return
            if slot.load is not LoadState.NONE or (journal and len(reader.journal(slot)) > slot.resumed):
                text = f"session {one.session}: its new engine goes on without waiting"
                one.came.set_exception(MoverError(Reason.GONE, text))
                return
        if now >= one.deadline:
            text = f"session {one.session}: its new engine made no room within {one.deadline - one.began:.2f} s"
            one.came.set_exception(MoverError(Reason.DESTINATION, text))
