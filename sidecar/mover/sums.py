"""Sums of full blocks, kept in memory: what a block held when it became full. Pure.

Invariant: a sum belongs to one (arena, session, generation, table generation, kind, ordinal); when any of these changes
it is never compared again. Ordinals are summed in order, so a session's sums are those of its first blocks. Bounded
in number.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...session.ids import SessionId
from .pools import SumKind

Owner = tuple[Path, SessionId, int]

SUMS_MAX = 8 << 20


@dataclass(slots=True)
class _Summed:
    table_generation: int
    kind: SumKind
    sums: "array[int]" = field(default_factory=lambda: array("Q"))


class Sums:
    """The sums of all sessions that are watched."""

    def __init__(self, count_max: int = SUMS_MAX) -> None:
        self._by_owner: dict[Owner, _Summed] = {}
        self._count = 0
        self._count_max = count_max

    @property
    def count(self) -> int:
        """How many sums are kept."""
        return self._count

    @property
    def room(self) -> int:
        """How many more can be kept."""
        return self._count_max - self._count

    def get(self, owner: Owner, table_generation: int, kind: SumKind) -> Sequence[int]:
        """The sums of a session's first blocks, as of one table generation."""
        summed = self._by_owner.get(owner)
        if summed is None or (summed.table_generation, summed.kind) != (table_generation, kind):
            return ()
        return summed.sums

    def length(self, owner: Owner) -> int:
        """How many sums of a session there are, under whichever table."""
        summed = self._by_owner.get(owner)
        return 0 if summed is None else len(summed.sums)

    def add(self, owner: Owner, table_generation: int, kind: SumKind, first: int, values: Sequence[int]) -> int:
        """Add the sums of the blocks from ordinal `first` on, and say how many of them are new.

        Those of an older table or another kind are forgotten. Of a block that has a sum the old one is kept: two may
        have looked at the same blocks at once, one of them further than the other.
        """
        summed = self._by_owner.get(owner)
        if summed is None or (summed.table_generation, summed.kind) != (table_generation, kind):
            self.drop(owner)
            summed = self._by_owner[owner] = _Summed(table_generation, kind)
        known = len(summed.sums)
        if first > known:
            return 0
        summed.sums.extend(values[known - first :])
        self._count += len(summed.sums) - known
        return len(summed.sums) - known

    def drop(self, owner: Owner) -> None:
        """Forget a session."""
        summed = self._by_owner.pop(owner, None)
        self._count -= len(summed.sums) if summed is not None else 0

    def owners(self, arena: Path) -> list[Owner]:
        """The sessions of an arena that have sums."""
        return [owner for owner in self._by_owner if owner[0] == arena]
