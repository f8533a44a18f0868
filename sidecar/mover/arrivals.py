"""Which sessions have come to an arena: one look at all its slots for everybody who waits there.

Many restores wait at once for the same engine to admit their sessions, and a look at all slots is what costs: so a look
is used again until it is LOOK_S old, or twice as old as it took. Invariant: what was found was in the arena at the time
of that look; whoever acts upon it refreshes the slot. Not for threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...session.arena import ArenaReader, Slot
from ...session.ids import SessionId

LOOK_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Look:
    reader: ArenaReader
    good_until_s: float
    slots: dict[tuple[SessionId, int], Slot]


class Arrivals:
    """The last look at each arena that somebody waits at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: dict[Path, _Look] = {}

    def find(self, reader: ArenaReader, session: SessionId, generation: int) -> Slot | None:
        """The slot of a session's generation, if it was there at the last look."""
        began_s = self._clock()
        look = self._looks.get(reader.path)
        if look is None or look.reader is not reader or began_s >= look.good_until_s:
            slots = {(slot.session, slot.generation): slot for slot in reader.slots()}
            now_s = self._clock()
            look = self._looks[reader.path] = _Look(reader, now_s + max(LOOK_S, 2 * (now_s - began_s)), slots)
        return look.slots.get((session, generation))

    def forget(self, path: Path) -> None:
        """Nobody waits at an arena any more."""
        self._looks.pop(path, None)
