"""Speed while all streams are decoding: between the last one's first token and the first one's end. Pure.

Owns that definition. A whole run's figures mix prefill into decoding; within this window an engine does nothing but
steps of the full batch, so that half a percent of a step can be seen.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..load.live import Live, Mark
from ..percentiles import percentile

# The first steps after the last prefill, and the last ones before the first end, are of another kind.
MARGIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Steady:
    """What a window showed: `tpot_ms` is the median stream's mean time between tokens."""

    seconds: float
    streams: int
    tpot_ms: float
    tokens_per_s: float


def steady(lives: Sequence[Live]) -> Steady | None:
    """The window of a run; None where there was none, as when some streams ended before others had begun."""
    marks = [live.marks for live in lives]
    if not marks or any(len(each) < 2 * MARGIN_TOKENS for each in marks):
        return None
    begin_s = max(each[MARGIN_TOKENS].at_s for each in marks)
    end_s = min(each[-1 - MARGIN_TOKENS].at_s for each in marks)
    if end_s <= begin_s:
        return None
    rates = [_within(each, begin_s, end_s) for each in marks]
    tpots = [span_s / tokens for tokens, span_s in rates if tokens]
    if len(tpots) < len(marks):
        return None
    return Steady(
        seconds=end_s - begin_s,
        streams=len(marks),
        tpot_ms=1000 * median(tpots),
        tokens_per_s=sum(tokens / span_s for tokens, span_s in rates),
    )


def _within(marks: Sequence[Mark], begin_s: float, end_s: float) -> tuple[int, float]:
    """Tokens that came between a stream's first and last arrival in the window, and the time between these."""
    inside = [mark for mark in marks if begin_s <= mark.at_s <= end_s]
    if len(inside) < 2:
        return 0, 1.0
    return inside[-1].count - inside[0].count, inside[-1].at_s - inside[0].at_s


@dataclass(frozen=True, slots=True)
class Histogram:
    """Sum and count of one of the engine's own histograms."""

    total_s: float
    count: float

    def mean_ms_since(self, before: "Histogram") -> float | None:
        """The mean of what was observed since then; None for nothing."""
        count = self.count - before.count
        return 1000 * (self.total_s - before.total_s) / count if count > 0 else None


def histogram(text: str, name: str) -> Histogram:
    """A histogram in Prometheus' text, all of its label sets together."""
    return Histogram(*(sum(_values(text, f"{name}_{part}")) for part in ("sum", "count")))


def _values(text: str, name: str) -> Iterable[float]:
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", re.MULTILINE)
    return (float(found) for found in pattern.findall(text))


@dataclass(frozen=True, slots=True)
class Overhead:
    """One variant beside another, pair by pair: `percent` is the median of what it takes more."""

    percent: float
    low: float
    high: float
    pairs: int


def overhead(base: Sequence[float], other: Sequence[float]) -> Overhead | None:
    """How much larger `other` is than `base`, in percent, over runs that stood beside each other; quartiles around."""
    found = [100 * (b / a - 1) for a, b in zip(base, other, strict=False) if a > 0]
    if not found:
        return None
    return Overhead(median(found), percentile(found, 25), percentile(found, 75), len(found))
