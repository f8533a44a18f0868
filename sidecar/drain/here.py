"""What the workers of this node have, as those who empty it or send sessions to it want to know.

Owns the reading of arenas for that: which sessions could leave, what they would cost, and what is free. It asks nobody
and changes nothing.
"""

import time
from collections.abc import Callable, Sequence

from ...session.errors import ArenaError
from ...session.records import SlotState
from ..coordinator import SidecarCoordinator
from ..session_record import Record, output_max
from ..workers import Epoch, Workers
from .order import Leaving, left_s
from .room import Free

# How many blocks a pool has, and how many positions are in one; None where nobody has said so yet.
Sizes = Callable[[str], tuple[int, int] | None]


class Here:
    """`sizes` tells those of a pool, `slots` is how many sessions each worker's arena holds."""

    def __init__(self, workers: Workers, coordinator: SidecarCoordinator, sizes: Sizes, slots: int) -> None:
        self._workers = workers
        self._coordinator = coordinator
        self._sizes = sizes
        self._slots = slots

    def leaving(self, worker: str | None = None) -> list[Leaving]:
        """Sessions that run here, or on one worker, and can go on elsewhere: not those that have an obstacle."""
        return [
            _leaving(record)
            for record in self._coordinator.in_flight()
            if not record.facts.exact_obstacle and worker in (None, record.owner.epoch.worker)
        ]

    def running(self) -> frozenset[str]:
        """All sessions that are here."""
        return frozenset(record.facts.session for record in self._coordinator.in_flight())

    def free(self) -> list[Free]:
        """What is free on each worker that takes sessions and says what KV of others it can use."""
        found = []
        for candidate in self._workers.candidates():
            epoch = self._workers.get(candidate.worker).current
            if epoch is not None and candidate.key is not None and epoch.pools:
                places = min(candidate.sessions_max, self._slots) - candidate.sessions
                found.append(Free(candidate.key.digest(), places, self._free_tokens(epoch)))
        return found

    def _free_tokens(self, epoch: Epoch) -> int | None:
        sizes = self._sizes(epoch.pools[0])
        if sizes is None or epoch.arena is None:
            return None
        block_count, block_tokens = sizes
        return max(block_count - _used(epoch), 0) * block_tokens


def _used(epoch: Epoch) -> int:
    """Blocks of sessions that run: one that several have counts as often, which errs to the safe side."""
    used = 0
    arena = epoch.arena
    for slot in arena.slots() if arena is not None else ():
        if slot.state is SlotState.LIVE and arena is not None:
            try:
                used += len(arena.table(slot).blocks)
            except ArenaError:
                # It has just ended, or is being given other blocks.
                continue
    return used


def _leaving(record: Record) -> Leaving:
    slot = record.owner.slot()
    outputs: Sequence[int] = () if slot is None else record.owner.journal(slot)
    age_s = time.monotonic() - record.began_s
    return Leaving(
        record.facts.session,
        (slot.prompt_len if slot is not None else 0) + len(outputs),
        len(outputs),
        left_s(len(outputs), output_max(record.facts), age_s),
        "" if record.owner.epoch.key is None else record.owner.epoch.key.digest(),
    )
