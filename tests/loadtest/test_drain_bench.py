"""The measurement of planned moves: what its figures are of."""

import json
from dataclasses import replace

from midstream.loadtest.client import Answer
from midstream.loadtest.drain_bench import Moved, body_of, gaps_ms, show


def answer(*arrivals_s: float) -> Answer:
    made = Answer()
    made.arrivals_s.extend(arrivals_s)
    return made


MOVED = Moved(
    way="workers", streams=2, tokens=10, whole=2, lost=0, repeated=0, exact=2, outcomes={"exact": 2}, identical=2,
    identical_without=2, step_ms=50.0, pauses_ms=[60.0, 240.0], pause_p50_ms=150.0, pause_p99_ms=238.2,
    silence_without_p99_ms=55.0, transfer_p99_ms=0.0, bar_ms=250.0, drain_s=1.0,
)  # fmt: skip


def test_a_pause_is_a_silence_that_touches_the_time_of_the_drain() -> None:
    seen = answer(0.0, 1.0, 1.1, 1.6, 1.7, 9.0)
    assert [round(gap) for gap in gaps_ms(seen, 1.05, 1.65)] == [100, 500, 100]
    assert gaps_ms(seen, 20, 30) == []
    # One that began before the drain and went on through all of it.
    assert [round(gap) for gap in gaps_ms(answer(0.0, 5.0), 1, 2)] == [5000]


def test_a_drain_holds_only_where_nothing_was_lost_and_nobody_waited_too_long() -> None:
    assert MOVED.holds
    for wrong in ({"lost": 1}, {"repeated": 1}, {"exact": 1}, {"whole": 1}, {"pause_p99_ms": 250.1}):
        assert not replace(MOVED, **wrong).holds  # type: ignore[arg-type]
    assert "held" in show(MOVED)
    assert "MISSED" in show(replace(MOVED, lost=1))


def test_each_stream_asks_for_something_else() -> None:
    bodies = [json.dumps(body_of(index, "tiny", 10)) for index in range(32)]
    assert len(set(bodies)) == 32
