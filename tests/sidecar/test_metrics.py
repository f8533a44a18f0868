"""Metrics: each there once, with the names that dashboards rely on."""

import re

from prometheus_client.parser import text_string_to_metric_families

from midstream.sidecar.metrics import Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_a_failover_is_counted_with_reason_outcome_and_tier() -> None:
    metrics = Metrics()
    metrics.failover(reason="process_death", outcome="exact", tier="held", gap_s=0.2, lag_tokens=0)
    metrics.failover(reason="eof", outcome="refused", tier="none")
    found = samples(metrics)
    assert found["midstream_failovers_total{outcome=exact,reason=process_death,tier=held}"] == 1
    assert found["midstream_failovers_total{outcome=refused,reason=eof,tier=none}"] == 1
    assert found["midstream_client_gap_seconds_count"] == 1
    assert found["midstream_client_gap_seconds_bucket{le=0.2}"] == 1
    assert found["midstream_snapshot_lag_tokens_bucket{le=0.0}"] == 1


def test_the_metrics_have_the_names_that_are_promised() -> None:
    metrics = Metrics()
    metrics.restores_refused.labels("key").inc()
    metrics.worker_restarts.labels("w-1").inc()
    metrics.request("/v1/completions", "session", 200)
    metrics.set_workers({"ready": 1})
    metrics.set_sessions({"decoding": 3})
    found = {re.sub(r"\{.*", "", name) for name in samples(metrics)}
    assert found >= {
        "midstream_output_mismatch_total",
        "midstream_restore_refused_total",
        "midstream_sessions",
        "midstream_workers",
        "midstream_worker_restarts_total",
        "midstream_arena_full_total",
        "midstream_holder_restarts_total",
        "midstream_mover_up",
        "midstream_tokens_sent_total",
        "midstream_requests_total",
        "midstream_restore_seconds_count",
    }


def test_a_state_that_nobody_is_in_any_more_is_gone() -> None:
    metrics = Metrics()
    metrics.set_workers({"ready": 2, "dead": 1})
    metrics.set_workers({"ready": 3})
    found = samples(metrics)
    assert found["midstream_workers{state=ready}"] == 3
    assert "midstream_workers{state=dead}" not in found


def test_the_mover_s_numbers_are_copied_and_nothing_else_of_its_status() -> None:
    metrics = Metrics()
    metrics.set_mover({"bytes_copied": 5, "store": {"chunks-kept": 7}, "name": "x", "up_to_date": True, "list": [1]})
    found = samples(metrics)
    assert found["midstream_mover_bytes_copied"] == 5
    assert found["midstream_mover_store_chunks_kept"] == 7
    assert found["midstream_mover_up_to_date"] == 1
    assert found["midstream_mover_up"] == 1
    assert not any("name" in name or "list" in name for name in found)
    metrics.set_mover(None)
    assert samples(metrics)["midstream_mover_up"] == 0


def test_what_plugins_count_adds_up_over_their_starts() -> None:
    metrics = Metrics()
    for epoch, count in ((1, 0), (1, 2), (1, 2), (2, 1), (2, 3)):
        metrics.set_plugin("w-0", epoch, {"arena_full": count, "hook_errors": 0})
    metrics.set_plugin("w-1", 1, {"arena_full": 4})
    found = samples(metrics)
    assert found["midstream_plugin_events_total{event=arena_full,worker=w-0}"] == 5
    assert found["midstream_plugin_events_total{event=hook_errors,worker=w-0}"] == 0
    assert found["midstream_arena_full_total"] == 9


def test_two_sidecars_in_one_process_do_not_share_figures() -> None:
    one, two = Metrics(), Metrics()
    one.tokens_sent.inc(3)
    assert samples(two)["midstream_tokens_sent_total"] == 0
