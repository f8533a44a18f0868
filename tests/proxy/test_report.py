"""How takeovers are told: one wording, whoever writes it, and whoever reads it back."""

from itertools import permutations

import pytest

from midstream.proxy.coordinator import LEAST_EXACT_FIRST, Outcome
from midstream.proxy.report import UNDISTURBED, Report
from midstream.proxy.sse import encode_comment


@pytest.mark.parametrize("outcome", [None, *Outcome])
def test_what_is_told_of_a_session_is_read_back_as_it_was(outcome: Outcome | None) -> None:
    gaps_s = () if outcome in (None, Outcome.REFUSED) else (0.0314, 1.25, 0.5)
    report = Report.of_session(outcome, gaps_s)
    assert Report.of_comment(encode_comment(str(report))) == report
    told = Report.of_headers(report.headers())
    assert told == Report(report.outcome, report.takeovers)


def test_the_words_of_a_report_are_those_that_clients_know() -> None:
    assert str(Report.of_session(None, ())) == "midstream outcome=undisturbed takeovers=0 gap_ms=0.0"
    assert str(Report.of_session(Outcome.EXACT, (0.0314, 0.5))) == "midstream outcome=exact takeovers=2 gap_ms=500.0"
    assert str(Report(Outcome.REFUSED)) == "midstream outcome=refused"


def test_every_outcome_has_its_place_in_the_order() -> None:
    assert sorted(LEAST_EXACT_FIRST) == sorted(Outcome)


def test_of_several_sessions_the_least_exact_is_told_whatever_their_order() -> None:
    order = [*LEAST_EXACT_FIRST, UNDISTURBED]
    for better, worse in ((b, w) for i, w in enumerate(order) for b in order[i:]):
        for pair in permutations([Report(better), Report(worse)]):
            told = Report.of_all(pair)
            assert told is not None
            assert told.outcome == worse


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"X-Midstream-Outcome": "perfect"},
        {"X-Midstream-Outcome": "exact", "X-Midstream-Takeovers": "-1"},
        {"X-Midstream-Outcome": "exact", "X-Midstream-Takeovers": "9" * 5000},
    ],
)
def test_headers_that_are_no_report_are_none(told: dict[str, str]) -> None:
    assert Report.of_headers(told) is None
