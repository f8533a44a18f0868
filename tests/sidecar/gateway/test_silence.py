"""How long a node has said nothing."""

from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.gateway.silence import OVERSLEPT_S, Silence

waits = st.floats(0.01, 1.0)


def test_a_node_is_lost_when_its_silence_has_lasted_so_long() -> None:
    silence = Silence(3.0)
    for _ in range(3):
        assert not silence.is_lost
        silence.passed(1.0, 1.0)
    assert silence.is_lost


@given(st.lists(waits, min_size=1))
def test_one_that_is_heard_begins_anew(took: list[float]) -> None:
    silence = Silence(3.0)
    for one in took:
        silence.passed(one, one)
    silence.heard()
    assert not silence.has_begun
    silence.passed(2.5, 2.5)
    assert not silence.is_lost


@given(st.lists(st.tuples(waits, st.floats(1.0, 3600.0)), min_size=1, max_size=50))
def test_a_gateway_that_was_stopped_itself_loses_nobody_for_it(pauses: list[tuple[float, float]]) -> None:
    silence = Silence(3.0)
    for at_most_s, slept_s in pauses:
        silence.passed(at_most_s + OVERSLEPT_S + slept_s, at_most_s)
    assert not silence.is_lost


@given(st.floats(0.1, 10.0), st.lists(waits, min_size=1, max_size=200))
def test_silence_is_never_counted_longer_than_it_was(limit_s: float, took: list[float]) -> None:
    silence = Silence(limit_s)
    for one in took:
        silence.passed(one, one)
    assert silence.is_lost == (sum(took) >= limit_s) or abs(sum(took) - limit_s) < 1e-6


def test_refusals_that_take_no_time_count_all_the_same() -> None:
    silence = Silence(0.1)
    silence.passed(0.0, 2.0)
    assert silence.has_begun
    for _ in range(100):
        silence.passed(0.0, 2.0)
    assert silence.is_lost
