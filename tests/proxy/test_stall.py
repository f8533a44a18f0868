"""The stall verdict: relative to a stream's own rhythm, and never before its first token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.stall import Rhythm, StallPolicy

POLICY = StallPolicy(floor_s=10, factor=20, ceiling_s=100)


def rhythm(*times_s: float) -> Rhythm:
    """A rhythm that has heard tokens at these times."""
    heard = Rhythm(POLICY)
    for time_s in times_s:
        heard.token(time_s)
    return heard


def test_nothing_is_a_stall_before_the_first_token() -> None:
    assert rhythm().remaining_s(1e9) is None


def test_a_quick_stream_stalls_after_the_floor() -> None:
    quick = rhythm(0, 0.1, 0.2)
    assert quick.remaining_s(10) == pytest.approx(0.2)
    assert (quick.remaining_s(10.3) or 0) < 0


def test_a_slow_stream_is_given_its_own_time() -> None:
    assert rhythm(0, 3, 6).remaining_s(6) == pytest.approx(60)


def test_the_ceiling_bounds_what_a_very_slow_stream_is_given() -> None:
    assert rhythm(0, 50).remaining_s(50) == pytest.approx(100)


def test_a_slow_gap_is_forgotten_in_time() -> None:
    steady = rhythm(0, 3, *(3 + 0.01 * i for i in range(1, 400)))
    assert steady.limit_s() == 10


def test_a_pause_of_the_proxys_own_is_not_the_engines_silence() -> None:
    paused = rhythm(0, 0.1)
    paused.resume(50)
    assert paused.remaining_s(50) == pytest.approx(10)
    paused.token(50.1)
    assert paused.limit_s() == 10


def test_after_a_replay_the_wait_for_room_and_kv_is_no_stall_until_the_ceiling() -> None:
    resumed = Rhythm(POLICY)
    resumed.replayed(0)
    assert resumed.remaining_s(99) == pytest.approx(1)
    resumed.token(60)
    assert resumed.remaining_s(60) == pytest.approx(POLICY.floor_s), "and that wait says nothing of its rhythm"


def test_a_resumed_rhythm_without_tokens_has_no_verdict_either() -> None:
    silent = rhythm()
    silent.resume(5)
    assert silent.remaining_s(1e9) is None


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_no_stream_stalls_within_its_usual_gap(gaps_s: list[float]) -> None:
    now_s, heard = 0.0, rhythm(0)
    for gap_s in gaps_s:
        now_s += gap_s
        heard.token(now_s)
    assert POLICY.floor_s <= heard.limit_s() <= POLICY.ceiling_s
    assert (heard.remaining_s(now_s + min(gaps_s[-1], POLICY.floor_s - 0.001)) or 0) > 0


@pytest.mark.parametrize("wrong", [{"floor_s": 0}, {"floor_s": 2, "ceiling_s": 1}, {"factor": 0.5}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="stall policy"):
        StallPolicy(**wrong)
