"""Two plots as SVG: distributions beside each other on a logarithmic axis, and one curve over time. Pure.

Owns the drawing. Sizes are pixels; nothing here knows what the numbers mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..drawing import LogAxis, frame
from ..percentiles import percentile
from .series import POINTS_MAX

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 110, 44, 12, 34
ROW = 34
CURVE_HEIGHT = 150
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on a curve, with a word."""

    at: float
    text: str


def distributions(series: Mapping[str, Sequence[float]], unit: str) -> str:
    """One row for each series: its values as dots, its median as a bar; "" where there is nothing."""
    # A series has the same colour in each plot, whichever others are empty there.
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(series)}
    found = {name: sorted(v for v in values if v > 0) for name, values in series.items()}
    found = {name: values for name, values in found.items() if values}
    if not found:
        return "<p class=note>None.</p>"
    low = math.floor(math.log10(min(values[0] for values in found.values())))
    high = max(math.ceil(math.log10(max(values[-1] for values in found.values()))), low + 1)
    x = LogAxis(LEFT, WIDTH - RIGHT, low, high).at
    height = TOP + ROW * len(found) + BOTTOM
    parts = [_open(height, f"Distributions, {unit}")]
    for power in range(low, high + 1):
        at = x(10**power)
        parts.append(_line(at, TOP, at, height - BOTTOM, "#dde2ea"))
        parts.append(_words(at, height - BOTTOM + 16, f"{10**power:g} {unit}", "middle"))
    for row, (name, values) in enumerate(found.items()):
        y = TOP + ROW * row + ROW / 2
        colour = colours[name]
        parts.append(_words(LEFT - 10, y + 4, name, "end"))
        step = max(len(values) // POINTS_MAX, 1)
        parts += [
            f'<circle cx="{x(v):.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" fill-opacity="0.35"/>'
            for v in [*values[::step], values[-1]]
        ]
        middle = percentile(values, 50)
        parts.append(
            f'<rect x="{x(middle) - 1.5:.1f}" y="{y - 12:.1f}" width="3" height="24" fill="{colour}">'
            f"<title>{escape(f'{name}: median {middle:g} {unit}')}</title></rect>"
        )
    return "".join([*parts, "</svg>"])


def curves(points: Sequence[tuple[float, float]], marks: Sequence[Mark], x_unit: str, y_unit: str) -> str:
    """One curve, with marks."""
    x_max = max([1.0, *(p[0] for p in points), *(m.at for m in marks)])
    y_max = max([1.0, *(p[1] for p in points)])
    height = TOP + CURVE_HEIGHT + BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_max * (WIDTH - LEFT - RIGHT), TOP + CURVE_HEIGHT * (1 - y / y_max)

    parts = [_open(height, f"{y_unit} over {x_unit}")]
    for share in (0.0, 0.5, 1.0):
        _, y = at(0, y_max * share)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#dde2ea"))
        parts.append(_words(LEFT - 10, y + 4, f"{y_max * share:,.0f} {y_unit}", "end"))
        x, _ = at(x_max * share, 0)
        parts.append(_words(x, height - BOTTOM + 16, f"{x_max * share:,.0f} {x_unit}", "middle"))
    for mark in marks:
        x, _ = at(mark.at, 0)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + CURVE_HEIGHT}" stroke="#dc2626" '
            f'stroke-dasharray="3 3"><title>{escape(mark.text)} at {mark.at:g} {x_unit}</title></line>'
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>')
    return "".join([*parts, "</svg>"])


def _open(height: float, label: str) -> str:
    return frame(WIDTH, height, label, 'width="100%" font-size="12" fill="#1c2330"')


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _words(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
