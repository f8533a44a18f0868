"""The two plots of a verification's page, as inline SVG. Pure.

Owns scales and shapes. Colours are the page's (CSS variables); every mark has a title that says in words what it is, so
that nothing depends on telling colours apart. Whatever comes from a record is escaped here.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..drawing import LogAxis, frame
from ..percentiles import percentile

SIGNS = {
    "identical": "",
    "restore": "✕",
    "variance": "~",
    "unsettled": "?",
    "recomputed": "r",
    "refused": "!",
    "missed": "·",
}
_HEIGHT, _GAP = 22, 4
# Cells share this width, but none is narrower than its words nor wider than it looks good.
_WIDTH, _NARROWEST, _WIDEST = 640, 74, 150
_LABEL = 200
_TOP = 34


def matrix(runs: Sequence[Mapping[str, Any]], prompts: Sequence[str], cuts: Sequence[str]) -> str:
    """Prompt by cut: one cell a case, coloured by verdict, with its way and the verdict's own sign."""
    cell = min(max(_WIDTH // max(len(cuts), 1) - _GAP, _NARROWEST), _WIDEST)
    width = _LABEL + len(cuts) * (cell + _GAP)
    height = _TOP + len(prompts) * (_HEIGHT + _GAP)
    by_cell = {(run["prompt"], run["cut"]): run for run in runs}
    parts = [_open(width, height, "Verdicts by prompt and cut")]
    lefts = [_LABEL + column * (cell + _GAP) for column in range(len(cuts))]
    for x, cut in zip(lefts, cuts, strict=True):
        middle = x + cell // 2
        parts.append(f'<text class="axis" x="{middle}" y="{_TOP - 12}" text-anchor="middle">{escape(cut)}</text>')
    for row, prompt in enumerate(prompts):
        y = _TOP + row * (_HEIGHT + _GAP)
        shown = prompt if len(prompt) <= 26 else prompt[:25] + "…"
        parts.append(f'<text class="label" x="{_LABEL - 10}" y="{y + 15}" text-anchor="end">{escape(shown)}</text>')
        parts += [
            _cell(x, y, cell, by_cell.get((prompt, cut)), prompt, cut) for x, cut in zip(lefts, cuts, strict=True)
        ]
    return "".join([*parts, "</svg>"])


def _cell(x: int, y: int, width: int, run: Mapping[str, Any] | None, prompt: str, cut: str) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{_HEIGHT}" rx="4"'
    if run is None:
        return f'<g><title>{escape(prompt)}, {escape(cut)}: not run</title><rect class="none" {place}/></g>'
    text = f"{prompt}, {cut}: {run['verdict']} ({run['way']} at token {run['cut_made']}, {run['gap_ms']:.0f} ms)"
    return (
        f'<g><title>{escape(text)}</title><rect class="v-{escape(run["verdict"])}" {place}/>'
        f'<text class="way" x="{x + 9}" y="{y + 15}">{escape(run["way"])} {run["cut_made"] or ""}</text>'
        f'<text class="sign" x="{x + width - 9}" y="{y + 15}" text-anchor="end">'
        f"{SIGNS.get(run['verdict'], '?')}</text></g>"
    )


def gaps(by_way: Mapping[str, Sequence[float]]) -> str:
    """The client's gaps by way on a logarithmic axis: one dot a case, lines at p50 and p90."""
    values = [max(value, 1.0) for found in by_way.values() for value in found]
    if not values:
        return '<p class="quiet">Nothing went on, so there are no recovery times.</p>'
    low, high = _bounds(min(values), max(values))
    left, right, lane = 70, 700, 90
    height = 30 + lane * len(by_way) + 34

    axis = LogAxis(left, right, low, high)

    def x(value: float) -> float:
        return axis.at(max(value, 1.0))

    parts = [_open(right + 60, height, "Recovery times by way")]
    for tick in _ticks(low, high):
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="14" x2="{at:.1f}" y2="{height - 30}"/>')
        parts.append(f'<text class="axis" x="{at:.1f}" y="{height - 12}" text-anchor="middle">{_duration(tick)}</text>')
    for row, (way, found) in enumerate(sorted(by_way.items())):
        middle = 30 + row * lane + lane / 2
        parts.append(f'<text class="label" x="{left - 14}" y="{middle + 4}" text-anchor="end">{escape(way)}</text>')
        for index, value in enumerate(sorted(found)):
            # Spread over the lane in a fixed pattern, so that equal values do not hide each other.
            y = middle + ((index * 7) % 13 - 6) * 2.6
            parts.append(
                f'<circle class="dot" cx="{x(value):.1f}" cy="{y:.1f}" r="4"><title>{escape(way)}: {value:.0f} ms'
                "</title></circle>"
            )
        # One label above and one below, so that they never meet.
        for percent, label_y in ((50, middle - 29), (90, middle + 37)):
            value = percentile(found, percent)
            at = x(value)
            parts.append(
                f'<line class="mark" x1="{at:.1f}" y1="{middle - 26}" x2="{at:.1f}" y2="{middle + 26}"/>'
                f'<text class="mark-label" x="{at:.1f}" y="{label_y}" text-anchor="middle">'
                f"p{percent} {_duration(value)}</text>"
            )
    return "".join([*parts, "</svg>"])


def _open(width: int, height: int, label: str) -> str:
    return frame(width, height, label, f'width="{width}"')


def _bounds(least: float, most: float) -> tuple[float, float]:
    """A little room around some values, as powers of ten; never nothing."""
    low, high = math.log10(least) - 0.1, math.log10(most) + 0.1
    return low, max(high, low + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high - low <= 3 else (1,)  # on many decades the steps between would crowd
    found = [10.0**power * step for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [tick for tick in found if low <= math.log10(tick) <= high]


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.3g} s"
