"""Free runs of blocks: first fit, exact reservations, and no block with two owners."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from midstream.adapters.transformers.extents import Extents, Run

BLOCKS = 24


def test_the_first_run_that_fits_is_taken() -> None:
    extents = Extents(10)
    assert extents.take(4) == Run(0, 4)
    assert extents.take(3) == Run(4, 3)
    extents.give(Run(0, 4))
    assert extents.take(2) == Run(0, 2)
    assert extents.take(3) == Run(7, 3)


def test_a_run_longer_than_any_hole_is_not_given_in_pieces() -> None:
    extents = Extents(6)
    extents.take(6)
    extents.give(Run(0, 2))
    extents.give(Run(4, 2))
    assert extents.free_count == 4
    assert extents.take(3) is None


def test_neighbouring_holes_become_one() -> None:
    extents = Extents(6)
    extents.take(6)
    for run in (Run(0, 2), Run(4, 2), Run(2, 2)):
        extents.give(run)
    assert extents.take(6) == Run(0, 6)


def test_a_block_that_is_free_cannot_be_given_again() -> None:
    extents = Extents(6)
    extents.take(4)
    with pytest.raises(ValueError, match="free already"):
        extents.give(Run(3, 2))
    with pytest.raises(ValueError, match="not in a pool"):
        extents.give(Run(5, 2))


def test_a_table_with_a_gap_is_no_run() -> None:
    assert Run.of_table((3, 4, 5)) == Run(3, 3)
    assert Run.of_table((3, 5)) is None
    assert Run.of_table((4, 3)) is None
    assert Run.of_table(()) is None


class ExtentsMachine(RuleBasedStateMachine):
    """Against a plain set of free blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(BLOCKS)
        self.free = set(range(BLOCKS))
        self.owned: list[Run] = []

    @rule(count=st.integers(1, BLOCKS))
    def take(self, count: int) -> None:
        run = self.extents.take(count)
        starts = [b for b in range(BLOCKS) if set(range(b, b + count)) <= self.free]
        assert (run is None) == (not starts)
        if run is not None:
            assert run == Run(starts[0], count)
            self.own(run)

    @rule(start=st.integers(0, BLOCKS), count=st.integers(1, 6))
    def reserve(self, start: int, count: int) -> None:
        run = Run(start, count)
        assert self.extents.reserve(run) == (set(run.blocks) <= self.free)
        if set(run.blocks) <= self.free:
            self.own(run)

    @rule(which=st.integers(0, BLOCKS))
    def give(self, which: int) -> None:
        if self.owned:
            run = self.owned.pop(which % len(self.owned))
            self.extents.give(run)
            self.free |= set(run.blocks)

    @invariant()
    def counts_agree(self) -> None:
        assert self.extents.free_count == len(self.free)

    def own(self, run: Run) -> None:
        self.free -= set(run.blocks)
        self.owned.append(run)


TestExtentsMachine = ExtentsMachine.TestCase
