"""Sums of blocks: whose they are, in which order, and how many."""

from pathlib import Path

from midstream.session.ids import SessionId
from midstream.sidecar.mover.pools import SumKind
from midstream.sidecar.mover.sums import Sums

ARENA = Path("/a")
XXH3 = SumKind.XXH3
OWNER = (ARENA, SessionId("1" * 32), 1)
OTHER = (ARENA, SessionId("1" * 32), 2)


def test_sums_belong_to_one_table_of_one_generation() -> None:
    sums = Sums()
    sums.add(OWNER, 1, XXH3, 0, [11, 12])
    assert list(sums.get(OWNER, 1, XXH3)) == [11, 12]
    assert list(sums.get(OWNER, 2, XXH3)) == []
    assert list(sums.get(OTHER, 1, XXH3)) == []
    sums.add(OWNER, 2, XXH3, 0, [21])
    assert list(sums.get(OWNER, 1, XXH3)) == []
    assert list(sums.get(OWNER, 2, XXH3)) == [21]
    assert sums.count == 1


def test_sums_of_one_kind_are_never_those_of_another() -> None:
    sums = Sums()
    sums.add(OWNER, 1, XXH3, 0, [11, 12])
    assert list(sums.get(OWNER, 1, SumKind.DEVICE)) == []
    sums.add(OWNER, 1, SumKind.DEVICE, 0, [21])
    assert list(sums.get(OWNER, 1, XXH3)) == []
    assert list(sums.get(OWNER, 1, SumKind.DEVICE)) == [21]
    assert sums.count == 1


def test_sums_are_added_in_order_and_never_with_a_gap() -> None:
    sums = Sums()
    sums.add(OWNER, 1, XXH3, 0, [11])
    sums.add(OWNER, 1, XXH3, 2, [13])
    assert list(sums.get(OWNER, 1, XXH3)) == [11]
    sums.add(OWNER, 1, XXH3, 1, [12, 13])
    sums.add(OWNER, 1, XXH3, 1, [99])
    assert list(sums.get(OWNER, 1, XXH3)) == [11, 12, 13]


def test_of_two_looks_at_the_same_blocks_the_one_that_went_further_adds_what_is_new() -> None:
    sums = Sums()
    assert sums.add(OWNER, 1, XXH3, 0, [11, 12]) == 2
    assert sums.add(OWNER, 1, XXH3, 0, [99, 99, 13]) == 1
    assert list(sums.get(OWNER, 1, XXH3)) == [11, 12, 13]
    assert sums.add(OWNER, 1, XXH3, 1, [12]) == 0
    assert sums.count == 3


def test_the_count_is_that_of_what_is_kept() -> None:
    sums = Sums(4)
    sums.add(OWNER, 1, XXH3, 0, [1, 2])
    sums.add(OTHER, 1, XXH3, 0, [3])
    assert (sums.count, sums.room) == (3, 1)
    assert sorted(sums.owners(ARENA)) == [OWNER, OTHER]
    assert sums.owners(Path("/b")) == []
    sums.drop(OWNER)
    sums.drop(OWNER)
    assert (sums.count, sums.room) == (1, 3)
