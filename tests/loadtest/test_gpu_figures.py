"""What is computed of a measurement on a GPU: windows, phases, bars, and the lines that tell them."""

import io
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from midstream.loadtest.client import HALF_A_CHARACTER
from midstream.loadtest.gpu import gap
from midstream.loadtest.gpu.phases import events, phases
from midstream.loadtest.gpu.results import Figure, Results, figure_of, table
from midstream.loadtest.gpu.streams import fault_of
from midstream.loadtest.gpu.windows import Histogram, histogram, overhead, steady
from midstream.loadtest.load.live import Live, Mark
from midstream.loadtest.load.strategies import Strategy
from midstream.loadtest.load.workload import Ask
from midstream.session.errors import ConfigError

# As a sidecar and its mover write them, two sessions of one engine that was killed at 12:00:00.000.
LOG = """
2026-01-02 11:59:58,500 INFO    midstream.coordinator: event=resumed session=ee worker=a generation=2 outcome=exact
2026-01-02 12:00:00,016 INFO    midstream.coordinator: event=interrupted session=aa worker=a generation=1 \
reason=process-death delivered=100 journal=101
2026-01-02 12:00:00,018 INFO    midstream.coordinator: event=interrupted session=bb worker=a generation=1 \
reason=process-death delivered=90 journal=90
2026-01-02 12:00:00,030 INFO    midstream.engine.a: [a] event=restored is what an engine may print
2026-01-02 12:00:00,050 INFO mover event=restored session=aa generation=2 tokens=4000 bytes=524288000 seconds=0.0200
2026-01-02 12:00:00,070 INFO mover event=restored session=bb generation=2 tokens=4000 bytes=524288000 seconds=0.0300
2026-01-02 12:00:00,085 INFO    midstream.coordinator: event=resumed session=aa worker=b generation=2 \
reason=process-death outcome=exact tier=held cut=101 lag=0 gap_ms=69.0 kv_tokens_loaded=4000 \
tokens_recomputed=1 detail=-
2026-01-02 12:00:00,090 INFO    midstream.coordinator: event=resumed session=bb worker=b generation=2 \
reason=process-death outcome=recomputed tier=journal cut=90 lag=0 gap_ms=72.0 kv_tokens_loaded=0 \
tokens_recomputed=4090 detail=checksum
Traceback (most recent call last):
"""
KILLED_AT = datetime(2026, 1, 2, 12, 0, 0)


def test_phases_are_read_from_the_logs_of_sidecar_and_mover() -> None:
    found = phases(events(LOG.splitlines(), KILLED_AT))
    assert found.sessions == 2
    assert (found.detection_ms, found.interrupted_last_ms) == (16.0, 18.0)
    assert (found.restored_first_ms, found.restored_last_ms) == (50.0, 70.0)
    assert (found.copy_p50_ms, found.copy_max_ms) == (25.0, 30.0)
    # From 30 ms, when the first copy began, to 70 ms.
    assert found.copy_gb_per_s == pytest.approx(2 * 524_288_000 / 0.040 / 1e9, abs=0.01)
    assert found.outcomes == {"exact": 1, "recomputed": 1}
    assert found.details == {"-": 1, "checksum": 1}
    assert found.reasons == {"process-death": 2}
    assert json.loads(json.dumps(found.told()))["copied_bytes"] == 2 * 524_288_000


def test_a_log_in_which_nothing_happened_has_no_figures() -> None:
    found = phases(events(["nothing", ""], KILLED_AT))
    assert found.sessions == 0
    assert found.detection_ms is None
    assert found.copy_gb_per_s is None


def test_a_death_that_a_lifeline_told_of_is_found_whoever_started_the_engine() -> None:
    assert phases(events(LOG.splitlines(), KILLED_AT)).told_by == "pidfd"
    for logger in ("midstream.attach", "midstream.supervise"):
        line = f"2026-01-02 12:00:00,003 INFO    {logger}: event=death worker=a epoch=1 by=lifeline pid=17"
        found = phases(events([line, *LOG.splitlines()], KILLED_AT))
        assert (found.told_by, found.lifeline_ms) == ("lifeline", 3.0)
        assert found.sessions == 2


def live_of(arrivals_s: list[float], first: int = 1) -> Live:
    """A stream that got one token at each of these moments."""
    live = Live(Ask(0, "/v1/completions", {}, len(arrivals_s)), 0, 0.0, sent_s=0.0)
    live.marks = [Mark(at_s, first + i) for i, at_s in enumerate(arrivals_s)]
    return live


def test_a_window_has_only_what_lies_between_the_last_first_token_and_the_first_end() -> None:
    # The first one decodes slowly while the other is prefilled, then both at 10 ms a step.
    early = live_of([0.1 * i for i in range(1, 11)] + [1.0 + 0.01 * i for i in range(1, 101)])
    late = live_of([1.0 + 0.01 * i for i in range(1, 141)])
    found = steady([early, late])
    assert found is not None
    assert found.streams == 2
    assert found.tpot_ms == pytest.approx(10.0)
    assert found.tokens_per_s == pytest.approx(200.0)
    assert 0.8 < found.seconds < 1.0


def test_streams_that_never_decoded_together_have_no_window() -> None:
    assert steady([live_of([0.01 * i for i in range(50)]), live_of([2 + 0.01 * i for i in range(50)])]) is None
    assert steady([live_of([0.1, 0.2])]) is None
    assert steady([]) is None


def test_overhead_is_that_of_runs_which_stood_beside_each_other() -> None:
    found = overhead([10.0, 20.0, 40.0], [10.1, 20.1, 40.0])
    assert found is not None
    assert found.percent == pytest.approx(0.5)
    assert (found.low, found.high) == (pytest.approx(0.25), pytest.approx(0.75))
    assert found.pairs == 3
    assert overhead([], [1.0]) is None


def test_the_engine_s_own_histogram_is_that_of_all_its_label_sets() -> None:
    text = (
        "# TYPE vllm:inter_token_latency_seconds histogram\n"
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01"} 7.0\n'
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 100.0\n'
        'vllm:inter_token_latency_seconds_count{engine="1",model_name="m"} 50.0\n'
        'vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.0\n'
        'vllm:inter_token_latency_seconds_sum{engine="1",model_name="m"} 5.0e-01\n'
        "vllm:inter_token_latency_seconds_created 1.7e9\n"
    )
    found = histogram(text, "vllm:inter_token_latency_seconds")
    assert found == Histogram(1.5, 150.0)
    assert found.mean_ms_since(Histogram(0.5, 50.0)) == pytest.approx(10.0)
    assert found.mean_ms_since(found) is None
    assert histogram("", "vllm:inter_token_latency_seconds") == Histogram(0, 0)


def test_each_figure_is_a_line_that_can_be_read_back_and_says_whether_its_bar_is_met(tmp_path: Path) -> None:
    out = io.StringIO()
    results = Results(tmp_path / "deep" / "figures.jsonl", out)
    results.add("gap", "p99", 99.12345, "ms", bar=100.0, sessions=32)
    results.add("copy", "rate", 900.0, "GB/s", bar=1000.0, at_least=True)
    results.add("gap", "start", 12.0, "s")
    results.missing("gap", "restart", "the time was over")
    lines = (tmp_path / "deep" / "figures.jsonl").read_text().splitlines()
    assert lines == out.getvalue().splitlines()
    told = [json.loads(line) for line in lines]
    assert [one.get("met") for one in told] == [True, False, None, None]
    assert told[0]["value"] == 99.1235
    assert told[3] == {"part": "gap", "name": "restart", "value": None, "unit": "", "why": "the time was over"}
    assert [figure_of(one) for one in told] == results.figures
    shown = table(results.figures).splitlines()
    assert "NOT MET" in shown[1]
    assert ">= 1000" in shown[1]
    assert shown[3].endswith("the time was over")
    assert table([]) == ""


def struck(**changes: Any) -> gap.Struck:
    """A scene of two sessions that went on."""
    values: dict[str, Any] = {
        "gaps_ms": (70.0, 80.0),
        "step_ms": 9.0,
        "phases": phases(events(LOG.splitlines(), KILLED_AT)),
    }
    return gap.Struck(**{**values, **changes})


def test_what_a_gap_may_be_is_its_parts() -> None:
    scene = gap.Scene(Strategy.KV, 32, 4000)
    assert scene.kv_bytes == 32 * 4000 * 131_072
    # Detection, 16.8 GB at 1,000 GB/s and a quarter more, two steps, 50 ms.
    assert gap.allowed_ms(scene, struck()) == pytest.approx(16.0 + 20.97 + 18.0 + 50.0, abs=0.01)


def test_scenes_are_read_from_words_and_what_is_none_is_refused() -> None:
    assert gap.scenes("kv:32x4000, restart:1x32000") == [
        gap.Scene(Strategy.KV, 32, 4000),
        gap.Scene(Strategy.RESTART, 1, 32_000),
    ]
    assert [scene.name for scene in gap.scenes(gap.SCENES)] == gap.SCENES.split(",")
    for word in ("kv", "kv:32", "engine:1x1", "kv:x4000", "control:1x10", "kv:-1x5"):
        with pytest.raises(ConfigError, match="is none"):
            gap.scenes(word)


def test_a_scene_tells_its_figures_and_the_comparison_follows(tmp_path: Path) -> None:
    results = Results(tmp_path / "figures.jsonl", io.StringIO())
    for strategy, gaps_ms in (("kv", (70.0, 80.0)), ("recompute", (700.0, 1600.0)), ("restart", (900.0, 900.0))):
        scene = gap.Scene(Strategy(strategy), 2, 4000)
        gap.tell(scene, struck(gaps_ms=gaps_ms, gone_ms=140.0 if strategy == "kv" else None), results)
    told = {figure.name: figure for figure in results.figures}
    assert told["kv:2x4000 gap p50"].value == 75.0
    assert told["kv:2x4000 gap p99"].met is True
    assert told["kv:2x4000 detection"].met is True
    assert told["kv:2x4000 detection"].more == {"by": "pidfd"}
    assert told["kv:2x4000 core gone (pidfd)"].value == 140.0
    assert "collected" in told["recompute:2x4000 core gone (pidfd)"].more["why"]
    assert told["kv:2x4000 exact"].met is False
    assert told["kv:2x4000 copy rate"].met is False
    assert told["recompute:2x4000 gap p99"].bar is None
    assert "restart:2x4000 detection" not in told
    gap.tell(gap.Scene(Strategy.KV, 3, 4000), struck(), results)
    assert results.figures[-1].value is None
    gap.compare(results)
    assert results.figures[-1] == Figure("gap", "kv:3x4000", None, more=results.figures[-1].more)


def test_the_strategies_are_held_against_each_other(tmp_path: Path) -> None:
    results = Results(tmp_path / "figures.jsonl", io.StringIO())
    for name, value in (("kv:32x4000", 100.0), ("recompute:32x4000", 3200.0), ("kv:1x32000", 60.0)):
        results.add("gap", f"{name} gap p99", value, "ms")
    results.add("gap", "recompute:1x32000 gap p99", 540.0, "ms")
    gap.compare(results)
    first, second = results.figures[-2:]
    assert (first.name, first.value, first.met) == ("32x4000, recompute over kv, p99", 32.0, None)
    assert (second.name, second.value, second.met) == ("1x32000, recompute over kv, p99", 9.0, False)


def test_half_a_character_is_no_fault_of_random_weights_and_everything_else_is_one() -> None:
    live = live_of([0.1, 0.2])
    assert fault_of(live) == ""
    live.ended_s = 0.3
    assert "status 0" in fault_of(live)
    live.answer.status, live.answer.done, live.answer.finish = 200, True, "length"
    live.answer.token_ids, live.answer.usage = [1, 2], {"completion_tokens": 2}
    live.answer.violations.append(HALF_A_CHARACTER)
    assert fault_of(live) == ""
    live.answer.violations.append("a second role")
    assert "a second role" in fault_of(live)
