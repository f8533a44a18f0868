"""The two plots of a verification's page, as inline SVG. Pure.

Owns scales and shapes. Colours are the page's (CSS variables); every mark has a title that says in words what it is, so
that nothing depends on telling colours apart. Whatever comes from a record is escaped here.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

LETTERS = {
    "identical": "",
    "restore": "✕",
    "variance": "~",
    "unsettled": "?",
    "recomputed": "r",
    "refused": "!",
    "missed": "·",
}
_CELL, _GAP = 30, 4
_LABEL = 190
_TOP = 34


def matrix(runs: Sequence[Mapping[str, Any]], prompts: Sequence[str], cuts: Sequence[str]) -> str:
    """Prompt by cut: one cell a case, coloured by verdict, with its way and the verdict's own sign."""
    width = _LABEL + len(cuts) * (_CELL * 2 + _GAP) + 10
    height = _TOP + len(prompts) * (_CELL + _GAP)
    by_cell = {(run["prompt"], run["cut"]): run for run in runs}
    parts = [_open(width, height, "Verdicts by prompt and cut")]
    for column, cut in enumerate(cuts):
        x = _LABEL + column * (_CELL * 2 + _GAP) + _CELL
        parts.append(f'<text class="axis" x="{x}" y="{_TOP - 12}" text-anchor="middle">{escape(cut)}</text>')
    for row, prompt in enumerate(prompts):
        y = _TOP + row * (_CELL + _GAP)
        shown = prompt if len(prompt) <= 26 else prompt[:25] + "…"
        parts.append(
            f'<text class="label" x="{_LABEL - 10}" y="{y + _CELL / 2 + 4}" text-anchor="end">{escape(shown)}</text>'
        )
        for column, cut in enumerate(cuts):
            run = by_cell.get((prompt, cut))
            parts.append(_cell(_LABEL + column * (_CELL * 2 + _GAP), y, run, prompt, cut))
    return "".join([*parts, "</svg>"])


def _cell(x: int, y: int, run: Mapping[str, Any] | None, prompt: str, cut: str) -> str:
    if run is None:
        return (
            f"<g><title>{escape(prompt)}, {escape(cut)}: not run</title>"
            f'<rect class="none" x="{x}" y="{y}" width="{_CELL * 2}" height="{_CELL}" rx="5"/></g>'
        )
    sign = LETTERS.get(run["verdict"], "?")
    text = f"{prompt}, {cut}: {run['verdict']} ({run['way']} at token {run['cut_made']}, {run['gap_ms']:.0f} ms)"
    return (
        f"<g><title>{escape(text)}</title>"
        f'<rect class="v-{escape(run["verdict"])}" x="{x}" y="{y}" width="{_CELL * 2}" height="{_CELL}" rx="5"/>'
        f'<text class="way" x="{x + 10}" y="{y + _CELL / 2 + 4}">{escape(run["way"])}</text>'
        f'<text class="sign" x="{x + _CELL * 2 - 10}" y="{y + _CELL / 2 + 4}" text-anchor="end">{sign}</text></g>'
    )


def gaps(by_way: Mapping[str, Sequence[float]]) -> str:
    """The client's gaps by way on a logarithmic axis: one dot a case, lines at p50 and p90."""
    values = [max(value, 1.0) for found in by_way.values() for value in found]
    if not values:
        return '<p class="quiet">Nothing went on, so there are no recovery times.</p>'
    low, high = _decades(min(values), max(values))
    left, right, lane = 70, 700, 74
    height = 30 + lane * len(by_way) + 34

    def x(value: float) -> float:
        return left + (math.log10(max(value, 1.0)) - low) / (high - low) * (right - left)

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
        ordered = sorted(found)
        for name, share in (("p50", 0.5), ("p90", 0.9)):
            value = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
            at = x(value)
            parts.append(
                f'<line class="mark" x1="{at:.1f}" y1="{middle - 26}" x2="{at:.1f}" y2="{middle + 26}"/>'
                f'<text class="mark-label" x="{at:.1f}" y="{middle - 29}" text-anchor="middle">'
                f"{name} {_duration(value)}</text>"
            )
    return "".join([*parts, "</svg>"])


def _open(width: float, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _decades(least: float, most: float) -> tuple[float, float]:
    """Whole decades around some values, in powers of ten; at least one."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return float(low), float(max(high, low + 1))


def _ticks(low: float, high: float) -> list[float]:
    found = []
    for power in range(int(low), int(high) + 1):
        found += [10.0**power * step for step in (1, 2, 5) if power < high or step == 1]
    # On many decades the steps between would crowd.
    return found if high - low <= 3 else [tick for tick in found if math.log10(tick).is_integer()]


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.3g} s"
