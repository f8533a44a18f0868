"""Draws how traffic and memory grow with a fleet: `python -m simulation.fleet.plot FIGURES.jsonl PICTURE.svg`.

Owns the picture: one row for each figure, all over the number of nodes on a logarithmic axis. It measures nothing.
"""

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from midstream.loadtest.drawing import LogAxis, frame

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 720, 120, 250, 60, 16, 34
_COLOURS = {"etcd": "#2563eb", "kubernetes": "#d97706"}
_ROWS = (
    ("node_requests_each_s", "requests of a node to the service, 1/s"),
    ("node_events_each_s", "changes that a node is told, 1/s"),
    ("roster_max", "members that a process knows"),
    ("kib_each", "memory of the whole simulation, KiB for each session"),
)

Lines = Sequence[dict[str, Any]]


def picture(figures: Lines) -> str:
    """The figures of some worlds as SVG."""
    told = [{**line, "kib_each": (line["peak_mib"] - line["rest_mib"]) * 1024 / line["sessions"]} for line in figures]
    sizes = sorted({line["nodes"] for line in told})
    axis = LogAxis(LEFT, WIDTH - RIGHT, math.log10(sizes[0]), math.log10(sizes[-1]))
    height = TOP + ROW * len(_ROWS) + BOTTOM
    parts = [frame(WIDTH, height, "Growth with the size of the fleet", 'width="100%" font-size="12" fill="#1c2330"')]
    for row, (name, words) in enumerate(_ROWS):
        parts += _row(told, axis, name, words, TOP + ROW * row)
    for size in sizes:
        x = axis.at(size)
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{LEFT - 10}" y="{height - BOTTOM + 18}" text-anchor="end">nodes</text>')
    for n, (service, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{WIDTH - 4}" y="{14 + 14 * n}" text-anchor="end" fill="{colour}">{service}</text>')
    return "".join([*parts, "</svg>\n"])


def _row(told: Lines, axis: LogAxis, name: str, words: str, top: float) -> list[str]:
    largest = max(line[name] for line in told) * 1.1 or 1.0
    bottom = top + ROW - 24
    parts = [
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#dde2ea"/>',
        f'<text x="{LEFT - 10}" y="{bottom - 36}" text-anchor="end">{escape(words)}</text>',
    ]
    for service, colour in _COLOURS.items():
        lines = sorted((one for one in told if one["coordinating"] == service), key=lambda one: one["nodes"])
        points = [(axis.at(one["nodes"]), bottom - (ROW - 40) * one[name] / largest, one[name]) for one in lines]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for x, y, value in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle" font-size="10">{value:.3g}</text>')
    return parts


def main() -> None:
    """The command."""
    figures, target = map(Path, sys.argv[1:3])
    target.write_text(picture([json.loads(line) for line in figures.read_text().splitlines() if line]))


if __name__ == "__main__":
    main()
