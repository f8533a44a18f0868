"""What a soak tries, and how it judges: drawn from a seed, even, and never wrong about a token."""

from itertools import islice

import pytest

from midstream.loadtest.cases import SAMPLINGS, Case, Cut, Way, draw
from midstream.loadtest.exactness import lost_and_duplicated
from midstream.loadtest.harness import Victim


def first(count: int, seed: int = 1, way: Way = Way.HELD) -> list[Case]:
    return list(islice(draw(seed, way, streams=3, max_tokens=96), count))


def test_a_seed_draws_the_same_cases_and_another_seed_others() -> None:
    assert first(20) == first(20)
    assert first(20) != first(20, seed=2)
    assert first(20) != first(20, way=Way.DISK)


def test_a_short_soak_goes_through_all_cuts_victims_and_samplings() -> None:
    cases = first(len(Cut))
    assert {case.cut for case in cases} == set(Cut)
    assert {case.victim for case in cases} == set(Victim)
    assert {request.sampling for case in cases for request in case.requests} == set(SAMPLINGS)
    assert all(len({request.prompt for request in case.requests}) == 3 for case in cases)


def test_only_those_die_that_were_named() -> None:
    victims = (Victim.CORE, Victim.TREE)
    cases = list(islice(draw(1, Way.HELD, streams=1, max_tokens=96, victims=victims), 10))
    for one, other in zip(cases[::2], cases[1::2], strict=True):
        assert {one.victim, other.victim} == set(victims)


@pytest.mark.parametrize("way", Way)
def test_edges_are_those_of_blocks_in_positions(way: Way) -> None:
    for case in first(200, way=way):
        cut = case.cut_at(prompt_len=21, output_count=96, block_tokens=16)
        assert 1 <= cut <= 96
        off = {Cut.EDGE_BEFORE: 15, Cut.EDGE: 0, Cut.EDGE_AFTER: 1}.get(case.cut)
        if off is not None:
            assert (21 + cut) % 16 == off
        if case.cut is Cut.LAST:
            assert cut == 96


def test_an_answer_of_one_token_can_be_cut_only_there() -> None:
    assert {case.cut_at(prompt_len=3, output_count=1, block_tokens=16) for case in first(30)} == {1}


@pytest.mark.parametrize(
    ("got", "lost", "duplicated"),
    [([1, 2, 3, 4], 0, 0), ([1, 2, 4], 1, 0), ([1, 2, 2, 3, 4], 0, 1), ([1, 2, 9, 4], 1, 1), ([], 4, 0)],
)
def test_each_missing_and_each_extra_token_is_counted(got: list[int], lost: int, duplicated: int) -> None:
    assert lost_and_duplicated([1, 2, 3, 4], got) == (lost, duplicated)
