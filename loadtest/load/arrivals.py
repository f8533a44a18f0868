"""When requests come: Poisson, constant, or as a trace file says. Pure but for reading that file.

Open loop: nothing here knows of answers. Invariant: times never go back, and a seed draws the same ones.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from ...session.errors import ConfigError

TRACE_LINES_MAX = 1_000_000
_TRACE_WORDS = (
    'expected one request a line: seconds, or an object with "at_s" (or "timestamp" in ms) '
    'and, if wanted, "input_length" and "output_length"'
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival, seconds after the beginning; lengths where the trace has them."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def poisson(rate: float, chance: Random) -> Iterator[Arrival]:
    """Independent arrivals, `rate` a second in the mean, without end."""
    at_s = 0.0
    while True:
        at_s += chance.expovariate(rate)
        yield Arrival(at_s)


def constant(rate: float) -> Iterator[Arrival]:
    """One arrival each 1/rate seconds, without end."""
    index = 0
    while True:
        yield Arrival(index / rate)
        index += 1


def repeated(trace: Sequence[Arrival]) -> Iterator[Arrival]:
    """A trace again and again: its last arrival is followed by its first after the mean time between two."""
    last_s = trace[-1].at_s
    pause_s = last_s / (len(trace) - 1) if len(trace) > 1 and last_s else 1.0
    began_s = 0.0
    while True:
        for arrival in trace:
            yield Arrival(began_s + arrival.at_s, arrival.prompt_tokens, arrival.output_tokens)
        began_s += last_s + pause_s


def read_trace(path: Path) -> list[Arrival]:
    """The arrivals of a trace file, from its first one on; ConfigError names the line that is wrong."""
    try:
        with path.open(encoding="utf-8") as lines:
            found = [_arrival(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a trace file") from error
    if not found or len(found) > TRACE_LINES_MAX:
        raise ConfigError(f"{path}: {len(found)} arrivals; {_TRACE_WORDS}, 1 to {TRACE_LINES_MAX}")
    for number, (one, other) in enumerate(pairwise(found), 2):
        if other.at_s < one.at_s:
            raise ConfigError(f"{path}: arrival {number} comes before the one above it; sort the file by time")
    first_s = found[0].at_s
    return [Arrival(a.at_s - first_s, a.prompt_tokens, a.output_tokens) for a in found]


def _arrival(line: str, place: str) -> Arrival:
    try:
        told: Any = json.loads(line)
        if isinstance(told, dict):
            at_s = float(told["at_s"]) if "at_s" in told else float(told["timestamp"]) / 1000
            arrival = Arrival(at_s, _length(told.get("input_length")), _length(told.get("output_length")))
        else:
            arrival = Arrival(float(told))
        if not 0 <= arrival.at_s < 1e12:
            raise ValueError
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{place}: {line.strip()[:80]!r} is no arrival; {_TRACE_WORDS}") from error
    return arrival


def _length(told: Any) -> int | None:
    if told is None:
        return None
    if isinstance(told, bool) or int(told) < 1:
        raise ValueError(told)
    return int(told)
