"""Verdicts, gaps and figures: they find what is planted, and nothing where nothing is."""

from random import Random

import pytest

from midstream.loadtest.client import Answer
from midstream.loadtest.load import figures
from midstream.loadtest.load.gaps import gaps_of
from midstream.loadtest.load.live import Live, Mark
from midstream.loadtest.load.records import Record, record_of
from midstream.loadtest.load.series import cumulative, tokens_per_second
from midstream.loadtest.load.verdict import Same, Verdict, judge, shift
from midstream.loadtest.load.workload import COMPLETIONS, Ask

WANTED = Random(1).sample(range(1000), 100)


def judged(got: list[int], *, counted: int | None = 100, controls: list[list[int]] | None = None) -> Verdict:
    return judge(got, counted, controls or [WANTED], is_whole=True, interrupted=True)


# ---- tokens


def test_the_undisturbed_answer_is_identical() -> None:
    assert judged(WANTED) == Verdict(Same.IDENTICAL)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("at", [1, 40, 80])
def test_tokens_that_are_missing_at_the_seam_are_lost(at: int, count: int) -> None:
    verdict = judged(WANTED[:at] + WANTED[at + count :])
    assert (verdict.same, verdict.lost, verdict.repeated) == (Same.DIFFERENT, count, 0)
    assert verdict.first_difference == at


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("at", [10, 40, 80])
def test_tokens_that_come_again_at_the_seam_are_repeated(at: int, count: int) -> None:
    verdict = judged(WANTED[:at] + WANTED[at - count : at] + WANTED[at:])
    assert (verdict.same, verdict.lost, verdict.repeated) == (Same.DIFFERENT, 0, count)


def test_a_repetition_is_found_although_the_number_of_tokens_is_right() -> None:
    # The engine itself went on at the wrong place: it counts as the client does, and both are wrong.
    verdict = judged(WANTED[:50] + WANTED[48:98])
    assert (verdict.repeated, verdict.lost) == (2, 0)
    assert judged(WANTED[:50] + WANTED[53:] + [1, 2, 3]).lost == 3


def test_tokens_that_the_engine_counted_and_nobody_got_are_lost_whatever_they_were() -> None:
    assert judged(WANTED[:50] + [7] * 40).lost == 10
    assert judged([*WANTED, 5], counted=100).repeated == 1
    assert judge([1, 2], 3, [], is_whole=True, interrupted=False) == Verdict(Same.UNKNOWN, lost=1)


def test_another_continuation_is_different_and_neither_lost_nor_repeated() -> None:
    chance = Random(99)
    verdict = judged(WANTED[:60] + [chance.randrange(1000, 2000) for _ in range(40)])
    assert (verdict.same, verdict.lost, verdict.repeated) == (Same.DIFFERENT, 0, 0)
    assert (verdict.first_difference, verdict.different_tokens) == (60, 40)


def test_where_undisturbed_answers_differ_a_difference_is_variance() -> None:
    other = WANTED[:30] + [2000 + i for i in range(70)]
    assert judged(other, controls=[WANTED, other]).same is Same.IDENTICAL
    third = WANTED[:70] + [3000 + i for i in range(30)]
    verdict = judged(third, controls=[WANTED, other])
    assert (verdict.same, verdict.first_difference) == (Same.VARIANCE, 70)


def test_an_answer_that_broke_off_is_broken_and_tells_what_it_lacks() -> None:
    verdict = judge(WANTED[:40], None, [WANTED], is_whole=False, interrupted=True)
    assert verdict == Verdict(Same.BROKEN, missing=60)


def test_a_shift_is_believed_only_when_enough_goes_on_alike() -> None:
    assert shift([*range(100), *range(99, 110)], [*range(111)], 100) == 0
    assert shift([*range(100), *range(99, 112)], [*range(113)], 100) == 1


# ---- gaps


def marks(*times: float) -> list[Mark]:
    return [Mark(at_s, index + 1) for index, at_s in enumerate(times)]


def test_the_gap_is_the_silence_that_the_fault_fell_into() -> None:
    assert gaps_of(0.0, marks(0.1, 0.2, 0.3, 1.5, 1.6), [0.35], 1) == [pytest.approx(1.2)]


def test_last_tokens_of_a_dying_engine_do_not_hide_the_gap() -> None:
    assert gaps_of(0.0, marks(0.1, 0.2, 0.41, 0.45, 5.0, 5.1), [0.4], 1) == [pytest.approx(4.55)]


def test_a_token_that_was_only_journaled_does_not_hide_the_gap() -> None:
    assert gaps_of(0.0, marks(27.8, 46.8, 47.5), [27.1], 1) == [pytest.approx(19.0)]


def test_a_long_silence_elsewhere_is_not_the_gap() -> None:
    assert gaps_of(0.0, marks(0.1, 30.0, 30.1, 30.9, 31.0), [30.2], 1) == [pytest.approx(0.8)]


def test_each_interruption_has_a_gap_of_its_own_in_order() -> None:
    found = gaps_of(0.0, marks(0.1, 0.2, 1.2, 1.3, 2.3, 10.0, 13.0, 13.1), [0.25, 10.5], 2)
    assert found == [pytest.approx(1.0), pytest.approx(3.0)]


def test_a_fault_elsewhere_gives_a_stream_no_gap_that_it_did_not_have() -> None:
    assert gaps_of(0.0, marks(0.1, 0.2, 5.0, 5.1), [0.15, 4.0], 1) == [pytest.approx(4.8)]
    assert gaps_of(0.0, marks(0.1, 0.2), [0.15], 0) == []


def test_before_the_first_token_the_gap_counts_from_the_fault() -> None:
    assert gaps_of(0.0, marks(9.0, 9.1), [7.0], 1) == [pytest.approx(2.0)]


def test_an_interruption_that_nobody_planned_has_the_longest_silence() -> None:
    assert gaps_of(0.0, marks(3.0, 3.1, 4.1, 4.2), [], 1) == [pytest.approx(1.0)]


# ---- records


def live(tokens: list[int], *, error: object = None, finish: str = "length", counted: int | None = None) -> Live:
    ask = Ask(4, COMPLETIONS, {"prompt": "x"}, len(WANTED))
    one = Live(ask, 0, planned_s=10.0, sent_s=10.25)
    usage = {"prompt_tokens": 9, "completion_tokens": len(tokens) if counted is None else counted}
    one.answer = Answer(status=200, done=error is None, finish=finish, usage=usage, error=error)  # type: ignore[arg-type]
    for index, token in enumerate(tokens):
        one.answer.token_ids.append(token)
        one.take(one.answer, 11.0 + 0.1 * index)
    one.ended_s = 11.0 + 0.1 * len(tokens)
    return one


def record(one: Live, **more: object) -> Record:
    told = {"strategy": "kv", "began_s": 10.0, "controls": [WANTED], "fault_times_s": [], "outcomes": [], **more}
    return record_of(one, **told)  # type: ignore[arg-type]


def test_a_record_tells_when_it_was_due_sent_and_answered() -> None:
    told = record(live(WANTED))
    assert (told.lateness_ms, told.ttft_ms, told.input_len, told.output_len) == (250.0, 750.0, 9, 100)
    assert told.tpot_ms == pytest.approx(100.0)
    assert len(told.itls_ms) == 99
    assert told.e2el_ms == pytest.approx(10_750.0)
    assert (told.success, told.verdict, told.interruptions) == (True, "identical", 0)


def test_a_record_takes_interruptions_from_the_sidecar_the_report_or_the_client_itself() -> None:
    outcome = {"reason": "process_death", "outcome": "exact", "tier": "held", "kv_tokens_loaded": 12}
    told = record(live(WANTED), outcomes=[outcome], fault_times_s=[12.05])
    assert (told.interruptions, told.reasons, told.tiers, told.kv_tokens_loaded) == (
        1,
        ("process_death",),
        ("held",),
        12,
    )
    assert len(told.gaps_ms) == 1
    reported = live(WANTED)
    reported.answer.report = "midstream outcome=recomputed takeovers=2 gap_ms=3.0"
    assert (record(reported).outcome, record(reported).interruptions) == ("recomputed", 2)
    again = live(WANTED)
    again.broken_s = [11.5]
    assert (record(again).outcome, record(again).interruptions) == ("restarted", 1)


def test_an_answer_that_ends_in_an_error_or_breaks_a_rule_is_no_success() -> None:
    assert not record(live(WANTED[:5], error={"message": "gone"})).success
    short = record(live(WANTED[:50]))
    assert not short.success
    assert short.violations == ("finish 'length' at 50 of 100 tokens",)
    no_usage = live(WANTED)
    no_usage.answer.usage = None
    assert "no usage" in record(no_usage).violations


def test_a_client_that_began_again_drops_what_it_has_and_notices_another_answer() -> None:
    one = live(WANTED[:40])
    second = Answer(token_ids=WANTED[:39])
    one.take(second, 20.0)
    assert len(one.tokens) == 40
    second.token_ids = WANTED[:42]
    one.take(second, 21.0)
    assert (one.tokens, one.marks[-1], one.changed_prefix) == (WANTED[:42], Mark(21.0, 42), False)
    one.take(Answer(token_ids=[5, *WANTED[1:50]]), 22.0)
    assert one.changed_prefix


# ---- figures


def test_figures_are_over_whole_answers_and_failures_are_counted() -> None:
    records = [record(live(WANTED)), record(live(WANTED[:5], error={"message": "gone"}))]
    told = figures.throughput(records, 10.0)
    assert (told["completed"], told["failed"], told["output_throughput"]) == (1, 1, 10.0)
    assert told["max_concurrent_requests"] == 2
    assert figures.latencies(records)["median_ttft_ms"] == 750.0
    assert figures.latencies([])["p99_itl_ms"] == 0.0
    assert figures.tokens(records)["missing"] == 95


def test_what_batching_alone_changes_is_told_apart() -> None:
    other = WANTED[:60] + [2000 + i for i in range(40)]
    hit = record(live(other), outcomes=[{"reason": "eof", "outcome": "exact", "tier": "held"}])
    told = figures.tokens([hit, record(live(other)), record(live(WANTED))])
    assert (told["different"], told["different_undisturbed"], told["undisturbed"]) == (1, 1, 2)
    assert (told["lost"], told["repeated"]) == (0, 0)


def test_strategies_are_compared_by_their_gaps_and_with_the_engine_alone() -> None:
    sides = {
        "kv": {"gaps": 3, "p50_gap_ms": 200.0, "p99_gap_ms": 400.0},
        "recompute": {"gaps": 3, "p50_gap_ms": 3000.0, "p99_gap_ms": 4000.0},
        "restart": {"gaps": 0, "p50_gap_ms": 0.0, "p99_gap_ms": 0.0},
    }
    assert figures.comparison(sides) == {"p50_gap_recompute_over_kv": 15.0, "p99_gap_recompute_over_kv": 10.0}
    assert figures.ratio(1.0, 0.0) is None


def test_series_keep_every_token_and_the_largest_value() -> None:
    assert sum(tokens_per_second([record(live(WANTED))])) == pytest.approx(100, abs=0.5)
    points = cumulative([float(i) for i in range(10_000)])
    assert len(points) <= 402
    assert points[-1] == (9999.0, 1.0)
    assert cumulative([]) == []
