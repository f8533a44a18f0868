"""From records to figures: latencies, throughput, gaps, and what became of the tokens. Pure.

Names of latencies and throughput are those of `vllm bench serve` (`mean_ttft_ms`, `p99_itl_ms`, `request_throughput`,
...), so that results can be laid side by side; what those do not know (gaps, verdicts) has names of its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from ..percentiles import percentile
from .records import Record
from .verdict import Same

PERCENTILES = (50, 90, 99)


def latencies(records: Iterable[Record]) -> dict[str, float]:
    """`mean_`, `median_`, `std_` and percentiles of ttft, tpot, itl and e2el, over answers that were whole."""
    good = [record for record in records if record.success]
    series = {
        "ttft": [r.ttft_ms for r in good if r.ttft_ms is not None],
        "tpot": [r.tpot_ms for r in good if r.tpot_ms is not None],
        "itl": [itl for r in good for itl in r.itls_ms],
        "e2el": [r.e2el_ms for r in good],
    }
    told = {}
    for name, values in series.items():
        told[f"mean_{name}_ms"] = round(fmean(values), 3) if values else 0.0
        told[f"median_{name}_ms"] = round(median(values), 3) if values else 0.0
        told[f"std_{name}_ms"] = round(pstdev(values), 3) if values else 0.0
        for percent in PERCENTILES:
            told[f"p{percent}_{name}_ms"] = round(percentile(values, percent), 3)
    return told


def throughput(records: Sequence[Record], duration_s: float) -> dict[str, float]:
    """Requests and tokens, in all and a second."""
    good = [record for record in records if record.success]
    inputs, outputs = sum(r.input_len for r in good), sum(r.output_len for r in good)
    span_s = duration_s or 1.0
    return {
        "duration": round(duration_s, 3),
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": round(len(good) / span_s, 4),
        "output_throughput": round(outputs / span_s, 3),
        "total_token_throughput": round((inputs + outputs) / span_s, 3),
        "max_concurrent_requests": _most_at_once(records),
    }


def _most_at_once(records: Sequence[Record]) -> int:
    changes = sorted([(r.sent_at_s, 1) for r in records] + [(r.ended_at_s, -1) for r in records])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def gaps(records: Iterable[Record]) -> dict[str, float]:
    """The client's gap at interruptions."""
    found = [gap for record in records for gap in record.gaps_ms]
    return {
        "gaps": len(found),
        **{f"p{percent}_gap_ms": round(percentile(found, percent), 3) for percent in PERCENTILES},
        "max_gap_ms": round(max(found, default=0.0), 3),
    }


def tokens(records: Sequence[Record]) -> dict[str, Any]:
    """What became of the tokens. `different_undisturbed` tells how much of `different` batching alone explains."""
    interrupted = [record for record in records if record.interruptions]
    others = [record for record in records if not record.interruptions]
    return {
        "streams": len(records),
        "interrupted": len(interrupted),
        "interruptions": sum(r.interruptions for r in interrupted),
        "lost": sum(r.lost for r in records),
        "repeated": sum(r.repeated for r in records),
        "missing": sum(r.missing for r in records),
        "violations": sum(len(r.violations) for r in records),
        "identical": _count(interrupted, Same.IDENTICAL),
        "different": _count(interrupted, Same.DIFFERENT),
        "variance": _count(interrupted, Same.VARIANCE),
        "different_undisturbed": _count(others, Same.DIFFERENT) + _count(others, Same.VARIANCE),
        "undisturbed": len(others),
        "changed_prefix": sum(r.changed_prefix for r in records),
    }


def _count(records: Iterable[Record], same: Same) -> int:
    return sum(record.verdict == same for record in records)


def lateness(records: Iterable[Record]) -> dict[str, float]:
    """How late the generator itself sent what was due."""
    late = [record.lateness_ms for record in records]
    return {
        "median_lateness_ms": round(percentile(late, 50), 3),
        "p99_lateness_ms": round(percentile(late, 99), 3),
        "max_lateness_ms": round(max(late, default=0.0), 3),
    }


def outcomes(sessions: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Of all takeovers that the sidecar tells of: how many by outcome, tier and reason."""
    found = [outcome for session in sessions for outcome in session.get("outcomes", ())]
    return {
        name: dict(sorted(Counter(str(outcome.get(field, "")) for outcome in found).items()))
        for name, field in (("outcomes", "outcome"), ("tiers", "tier"), ("reasons", "reason"))
    }


def ratio(one: float, other: float) -> float | None:
    """`one` over `other`; None where there is nothing to divide by."""
    return round(one / other, 3) if other else None


def comparison(strategies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the strategies come to beside each other: gaps over those of `kv`, and the sidecar beside the engine."""
    told: dict[str, Any] = {}
    kv = strategies.get("kv", {})
    for name in ("recompute", "restart"):
        other = strategies.get(name, {})
        if kv.get("gaps") and other.get("gaps"):
            told[f"p50_gap_{name}_over_kv"] = ratio(other["p50_gap_ms"], kv["p50_gap_ms"])
            told[f"p99_gap_{name}_over_kv"] = ratio(other["p99_gap_ms"], kv["p99_gap_ms"])
    alone, beside = strategies.get("engine"), strategies.get("control")
    if alone and beside:
        for name in ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "output_throughput"):
            told[f"{name}_sidecar_over_engine"] = ratio(beside[name], alone[name])
    return told
