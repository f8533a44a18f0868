"""Figures of a measurement: one JSON line each as they come, and a table of all of them at the end.

Owns the lines' form: `part`, `name`, `value`, `unit`, where there is a bar `bar` and `met`, and what else explains it.
A figure that could not be had is a line, too (`value` null and `why`), so that nothing is missing silently.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `bar` is the most (or with `at_least` the least) that it may be."""

    part: str
    name: str
    value: float | None
    unit: str = ""
    bar: float | None = None
    at_least: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none, or no figure."""
        if self.bar is None or self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def told(self) -> dict[str, Any]:
        """As the object of its line."""
        said: dict[str, Any] = {"part": self.part, "name": self.name, "value": self.value, "unit": self.unit}
        if self.bar is not None:
            said |= {"bar": self.bar, "bar_is": "least" if self.at_least else "most", "met": self.met}
        return {**said, **self.more}


def figure_of(told: dict[str, Any]) -> Figure:
    """A figure from the object of its line."""
    known = ("part", "name", "value", "unit", "bar", "bar_is", "met")
    return Figure(
        told["part"],
        told["name"],
        told["value"],
        told.get("unit", ""),
        told.get("bar"),
        told.get("bar_is") == "least",
        {name: value for name, value in told.items() if name not in known},
    )


class Results:
    """Writes figures to a file and to `out`, each as soon as it is known."""

    def __init__(self, path: Path, out: TextIO = sys.stdout) -> None:
        self._path = path
        self._out = out
        self.figures: list[Figure] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        part: str,
        name: str,
        value: float | None,
        unit: str = "",
        *,
        bar: float | None = None,
        at_least: bool = False,
        **more: Any,
    ) -> Figure:
        """One figure more."""
        rounded = None if value is None else round(value, 4)
        figure = Figure(part, name, rounded, unit, None if bar is None else round(bar, 4), at_least, more)
        self.figures.append(figure)
        line = json.dumps(figure.told())
        with self._path.open("a", encoding="utf-8") as sink:
            sink.write(line + "\n")
        print(line, file=self._out, flush=True)
        return figure

    def missing(self, part: str, name: str, why: str) -> None:
        """A figure that could not be had."""
        self.add(part, name, None, why=why)


def table(figures: Sequence[Figure]) -> str:
    """The figures as a short table for people."""
    rows = [
        (f"{f.part}: {f.name}", "missing" if f.value is None else f"{f.value:g} {f.unit}".rstrip(), _bar(f))
        for f in figures
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {bar}".rstrip() for name, value, bar in rows)


def _bar(figure: Figure) -> str:
    if figure.value is None:
        return str(figure.more.get("why", ""))
    if figure.bar is None:
        return ""
    return f"{'>=' if figure.at_least else '<='} {figure.bar:g}: {'met' if figure.met else 'NOT MET'}"
