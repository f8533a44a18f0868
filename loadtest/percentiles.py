"""What p50, p90 and p99 mean in everything that is measured here. Pure.

Owns the one definition: that of numpy and so of the known serving benchmarks, between the two nearest ranks. So p50 is
the median, and figures of different commands can be laid side by side.
"""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` percent of some values lie, between the two nearest ranks; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    # Not beyond its neighbours, whatever rounding does.
    return min(ordered[low] + (ordered[high] - ordered[low]) * (at - low), ordered[high])
