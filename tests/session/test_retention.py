"""What goes first when a store is full."""

from hypothesis import given
from hypothesis import strategies as st

from midstream.session.retention import Candidate, Rank, plan


def candidate(name: str, rank: Rank, created_at: float, chunks: str) -> Candidate:
    return Candidate(name, rank, created_at, 1, frozenset(chunks))


SIZES = {letter: 100 for letter in "abcdefgh"}


def test_finished_go_before_superseded_and_those_before_live_ones_and_the_oldest_first() -> None:
    candidates = [
        candidate("live-old", Rank.LIVE, 1, "a"),
        candidate("superseded-new", Rank.SUPERSEDED, 9, "b"),
        candidate("superseded-old", Rank.SUPERSEDED, 2, "c"),
        candidate("finished-new", Rank.FINISHED, 8, "d"),
        candidate("finished-old", Rank.FINISHED, 3, "e"),
    ]
    assert plan(candidates, SIZES, 10**9) == [
        "finished-old",
        "finished-new",
        "superseded-old",
        "superseded-new",
        "live-old",
    ]


def test_no_more_goes_than_has_to() -> None:
    candidates = [candidate(str(n), Rank.FINISHED, n, "abcd"[n]) for n in range(4)]
    assert plan(candidates, SIZES, 0) == []
    assert plan(candidates, SIZES, 101) == ["0"]
    assert plan(candidates, SIZES, 102) == ["0", "1"]


def test_a_shared_chunk_counts_only_with_the_last_that_refers_to_it() -> None:
    candidates = [candidate("1", Rank.FINISHED, 1, "ab"), candidate("2", Rank.FINISHED, 2, "ab")]
    assert plan(candidates, SIZES, 50) == ["1", "2"]


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Rank)), st.integers(0, 9), st.sets(st.sampled_from("abcdefgh"))), max_size=12
    ),
    st.integers(0, 1200),
)
def test_a_plan_frees_enough_or_takes_everything(drawn: list[tuple[Rank, int, set[str]]], wanted: int) -> None:
    candidates = [Candidate(str(n), r, c, 1, frozenset(s)) for n, (r, c, s) in enumerate(drawn)]
    chosen = plan(candidates, SIZES, wanted)
    kept = set().union(*(c.chunks for c in candidates if c.snapshot not in chosen))
    gone = set().union(*(c.chunks for c in candidates if c.snapshot in chosen)) - kept
    freed = len(chosen) + sum(SIZES[name] for name in gone)
    assert freed >= wanted or len(chosen) == len(candidates)
    ranks = {c.snapshot: c.rank for c in candidates}
    assert max((ranks[name] for name in chosen), default=0) <= min(
        (r for n, r in ranks.items() if n not in chosen), default=9
    )
