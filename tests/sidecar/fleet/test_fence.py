"""The fence: open before its time is over, and never again once its lease is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.fleet.backoff import Backoff
from midstream.sidecar.fleet.fence import MARGIN, Fence, WhenAlone

times = st.floats(0, 1e6)


def test_it_is_closed_before_the_first_answer_however_it_is_to_behave_alone() -> None:
    for when_alone in WhenAlone:
        assert not Fence(when_alone).is_open(0)
        assert Fence(when_alone).until_s == -math.inf


@given(st.lists(st.tuples(times, st.floats(3, 60)), min_size=1), times)
def test_it_is_open_only_within_the_time_that_was_promised_less_a_margin(
    renewals: list[tuple[float, float]], now_s: float
) -> None:
    fence = Fence(WhenAlone.STOP)
    for asked_s, granted_s in renewals:
        fence.renewed(asked_s, granted_s)
    until_s = max(asked_s + granted_s * (1 - MARGIN) for asked_s, granted_s in renewals)
    assert fence.until_s == until_s
    assert fence.is_open(now_s) == (now_s < until_s)


@given(st.sampled_from(WhenAlone), st.lists(times), times)
def test_what_is_lost_is_closed_for_good(when_alone: WhenAlone, later: list[float], now_s: float) -> None:
    fence = Fence(when_alone)
    fence.renewed(0, 10)
    assert fence.is_open(1)
    fence.lose()
    for asked_s in later:
        fence.renewed(asked_s, 60)  # an answer that was under way
    assert not fence.is_open(now_s)
    assert fence.until_s == -math.inf
    assert fence.is_lost


def test_one_that_serves_alone_is_open_for_as_long_as_nobody_says_that_its_lease_is_over() -> None:
    fence = Fence(WhenAlone.SERVE)
    fence.renewed(0, 3)
    assert fence.is_open(1e6)


def test_a_lease_of_no_time_is_none() -> None:
    with pytest.raises(ValueError, match="a lease of 0 s is none"):
        Fence(WhenAlone.STOP).renewed(0, 0)


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=30))
def test_waits_double_within_their_bounds(draws: list[float]) -> None:
    numbers = iter(draws)
    backoff = Backoff(0.1, 5.0, lambda: next(numbers))
    step_s = 0.1
    for _ in draws:
        assert step_s / 2 <= backoff.wait_s() <= step_s
        step_s = min(5.0, step_s * 2)
    numbers = iter([0.0])
    backoff.succeeded()
    assert backoff.wait_s() == 0.05
