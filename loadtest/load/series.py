"""What plots show, as numbers: distributions and rates over time. Pure."""

from collections.abc import Sequence
from math import floor

from .records import Record

POINTS_MAX = 400
SECONDS_MAX = 24 * 3600


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of all that are at most so large), thinned out to `POINTS_MAX` points; the largest is kept."""
    ordered = sorted(values)
    step = max(len(ordered) // POINTS_MAX, 1)
    picked = [*range(0, len(ordered) - 1, step), len(ordered) - 1] if ordered else []
    return [(ordered[i], (i + 1) / len(ordered)) for i in picked]


def tokens_per_second(records: Sequence[Record]) -> list[float]:
    """Tokens that arrived in each second of a pass, at the mean of their chunks."""
    counts: list[float] = []
    for record in records:
        if record.ttft_ms is None:
            continue
        at_s = record.sent_at_s + record.ttft_ms / 1000
        each = record.output_len / (len(record.itls_ms) + 1)
        for wait_ms in (0.0, *record.itls_ms):
            at_s += wait_ms / 1000
            second = min(max(floor(at_s), 0), SECONDS_MAX)
            counts += [0.0] * (second + 1 - len(counts))
            counts[second] += each
    return [round(count, 2) for count in counts]
