"""What a session's takeovers came to, by what its nodes have said of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.coordinator import Outcome, SessionFacts
from midstream.session.ids import SessionId
from midstream.sidecar.gateway.session import Session, Stay, told

FACTS = SessionFacts(SessionId("5" * 32), "/v1/completions", {}, True)


def first(**fields: object) -> Stay:
    return Stay("a", 1, (), **fields)  # type: ignore[arg-type]


def later(*, gap_ms: float | None = 5.0, resumes: bool = True) -> Stay:
    return Stay("b", 2, (), "node_lost", resumes=resumes, gap_ms=gap_ms)


def test_a_session_that_nothing_has_happened_to_has_no_outcome() -> None:
    assert Session(FACTS, [first()], 0.0).came_to() is None


def test_a_takeover_of_which_nobody_has_said_anything_was_recomputed() -> None:
    assert later().came_to() is Outcome.RECOMPUTED


def test_one_of_which_the_client_has_nothing_yet_counts_for_nothing() -> None:
    assert later(gap_ms=None).came_to() is None


def test_a_new_run_for_a_client_that_has_nothing_is_called_one() -> None:
    assert later(resumes=False).came_to() is Outcome.RESTARTED


def test_only_its_nodes_word_makes_it_exact() -> None:
    stay = later()
    stay.told(1, Outcome.EXACT)
    assert stay.came_to() is Outcome.EXACT


def test_a_node_that_knows_of_no_takeover_has_vouched_for_none() -> None:
    stay = later()
    stay.told(0, None)
    assert stay.came_to() is Outcome.RECOMPUTED


def test_a_further_takeover_within_the_node_is_not_covered_by_its_word_on_the_first() -> None:
    stay = later()
    stay.heard([{"outcome": "exact", "tier": "disk"}])
    assert stay.came_to() is Outcome.EXACT
    stay.begun(2)
    assert stay.came_to() is Outcome.RECOMPUTED
    stay.heard([{"outcome": "exact"}, {"outcome": ""}])
    assert stay.came_to() is Outcome.RECOMPUTED
    stay.told(2, Outcome.EXACT)
    assert stay.came_to() is Outcome.EXACT


@pytest.mark.parametrize("word", ["interrupted", "", "splendid", None, 3])
def test_words_that_are_no_outcome_say_nothing(word: object) -> None:
    stay = later()
    stay.heard([{"outcome": word, "tier": "disk"}])
    assert (stay.said, stay.came_to()) == (0, Outcome.RECOMPUTED)


def test_a_tier_that_is_none_makes_no_label() -> None:
    stay = later()
    stay.heard([{"outcome": "exact", "tier": "x" * 1000, "detail": "y" * 1000}])
    assert (stay.tier.value, len(stay.detail)) == ("none", 200)


outcomes = st.sampled_from([Outcome.RESTARTED, Outcome.RECOMPUTED, Outcome.EXACT])


@given(st.lists(st.tuples(st.booleans(), st.one_of(st.none(), outcomes), st.integers(0, 3), st.integers(0, 3))))
def test_nothing_is_exact_that_was_not_vouched_for(stays: list[tuple[bool, Outcome | None, int, int]]) -> None:
    session = Session(FACTS, [first()], 0.0)
    vouched = True
    for resumes, outcome, begun, said in stays:
        stay = later(resumes=resumes)
        session.move_to(stay)
        stay.begun(begun)
        stay.said, stay.outcome = said, outcome
        vouched = vouched and resumes and outcome is Outcome.EXACT and said >= begun
    if session.came_to() is Outcome.EXACT:
        assert vouched
    assert len(told(session, "running", 0.0)["outcomes"]) == len(stays)


def test_a_node_that_turns_it_away_is_asked_again_after_a_while_that_grows() -> None:
    session = Session(FACTS, [first()], 0.0, since_s=0.0)
    now_s, waits = 0.0, []
    for _ in range(8):
        session.avoid("b", now_s)
        step = 0.0
        while "b" in session.avoided(now_s + step):
            step += 0.25
        waits.append(step)
        now_s += step
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, 30.0)


def test_one_of_which_nothing_has_begun_asks_each_node_once() -> None:
    session = Session(FACTS, [first()], 0.0)
    session.avoid("b", 0.0)
    assert session.avoided(1e9) == {"b"}
