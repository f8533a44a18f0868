"""The account of many restores that come at once: what it says of calls that overlap, and of those that do not."""

import pytest

from midstream.sidecar.mover.burst import Burst, CallTimes


def figures(told: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (part.partition("=") for part in told.split()[1:])}


def test_what_a_card_had_nothing_to_do_is_what_no_call_covers() -> None:
    burst = Burst(10.0)
    for now_s in (10.001, 10.002, 10.003):
        burst.came(now_s)
    # The second is inside the first, and between the third and the others there is nothing for 2 ms.
    for handed, begun, sent, over, seen in (
        (10.004, 10.005, 10.006, 10.010, 10.0105),
        (10.006, 10.0065, 10.007, 10.009, 10.0105),
        (10.010, 10.011, 10.012, 10.013, 10.013),
    ):
        burst.call(CallTimes(handed, begun, sent, over), seen)
    burst.plan_s, burst.answer_s, burst.size_bytes = 0.0004, 0.0002, 77
    found = figures(burst.told(10.014))
    assert found == pytest.approx(
        {
            "sessions": 3, "calls": 3, "bytes": 77, "came_ms": 3.0, "first_sent_ms": 6.0, "idle_ms": 2.0,
            "last_over_ms": 13.0, "all_ms": 14.0, "plan_ms": 0.4, "hand_ms": 2.5, "launch_ms": 2.5, "back_ms": 2.0,
            "answer_ms": 0.2,
        },
        abs=0.011,
    )  # fmt: skip


def test_the_calls_may_be_told_in_any_order() -> None:
    one, other = Burst(0.0), Burst(0.0)
    calls = [(CallTimes(0.0, 0.1, 0.2, 0.4), 0.5), (CallTimes(0.0, 0.1, 0.3, 0.9), 1.0)]
    for burst, order in ((one, calls), (other, calls[::-1])):
        burst.came(0.0)
        for times, seen_s in order:
            burst.call(times, seen_s)
    assert one.told(1.0) == other.told(1.0)
