"""The cards as metrics: one series a card for each figure. Label values are UUIDs of cards that are in the machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .xid import Verdict

_GAUGES = {
    "lost": "1: the driver has lost the card.",
    "ecc_uncorrected": "Uncorrected memory errors since the driver was loaded.",
    "remap_pending": "1: a row of its memory is replaced at the next reset.",
    "remap_failed": "1: a row of its memory could not be replaced.",
    "recovery_action": "What its driver asks for, as NVML numbers it; 0: nothing.",
    "busy_percent": "Share of time in which a kernel ran.",
    "temperature_c": "Temperature of the chip.",
    "free_bytes": "Memory that is free.",
    "total_bytes": "Memory that it has.",
}
XIDS_MAX = 64


class CardFigures(Collector):
    """`told` gives what the watch has told last; nothing where cards are not watched."""

    def __init__(self) -> None:
        self.told: Callable[[], Sequence[Mapping[str, Any]]] = list

    def collect(self) -> Iterable[Metric]:
        cards = self.told()
        if not cards:
            return
        verdicts = GaugeMetricFamily(
            "midstream_card_verdict", "0: nothing is wrong, 1: to be watched, 2: to be left.", labels=("gpu",)
        )
        for card in cards:
            verdicts.add_metric([card["gpu"]], list(Verdict).index(Verdict(card["verdict"])))
        yield verdicts
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"midstream_card_{name}", text, labels=("gpu",))
            for card in cards:
                if card[name] is not None:
                    gauge.add_metric([card["gpu"]], float(card[name]))
            if gauge.samples:
                yield gauge
        slow = GaugeMetricFamily("midstream_card_slowed", "1: its limit slows it down.", labels=("gpu", "limit"))
        for card in cards:
            for limit in ("power", "thermal"):
                slow.add_metric([card["gpu"], limit], float(limit in card["slowed_by"]))
        yield slow
        xids = CounterMetricFamily("midstream_card_xids", "Xids that its driver told of.", labels=("gpu", "xid"))
        for card in cards:
            for code, count in sorted(card["xids"].items())[:XIDS_MAX]:
                xids.add_metric([card["gpu"], code], count)
        yield xids

    def describe(self) -> Iterable[Metric]:
        return []
