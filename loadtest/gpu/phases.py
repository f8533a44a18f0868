"""A takeover's phases, as the logs of the sidecar and its mover tell them. Pure.

Owns what is read from those lines: `event=death` (which a lifeline told of), `event=interrupted`, `event=restored` and
`event=resumed`, each with the time at which it was written. All figures are milliseconds after the kill unless they say
otherwise.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..percentiles import percentile

# By whom it was written: what engines print is in the same log.
_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ +(?:midstream\.(?:coordinator|attach|supervise):|mover) "
    r"event=(death|interrupted|restored|resumed) (.*)$"
)
_FIELD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class Event:
    """One line: what happened, when (milliseconds after the kill), and its fields."""

    name: str
    at_ms: float
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Phases:
    """`copy_gb_per_s` is over all sessions: their bytes, from the first copy's begin to the last one's end."""

    sessions: int
    detection_ms: float | None
    interrupted_last_ms: float | None
    restored_first_ms: float | None
    restored_last_ms: float | None
    copied_bytes: int
    copy_p50_ms: float | None
    copy_max_ms: float | None
    copy_gb_per_s: float | None
    reasons: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)
    lifeline_ms: float | None = None

    @property
    def told_by(self) -> str:
        """What told of the death."""
        return "pidfd" if self.lifeline_ms is None else "lifeline"

    def told(self) -> dict[str, Any]:
        """For the line of a figure."""
        return {name: getattr(self, name) for name in self.__slots__}


def events(lines: Iterable[str], killed_at: datetime) -> list[Event]:
    """The events after a kill, in the order of the log. `killed_at` is local time without a zone, as the log's is."""
    found = []
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f")
        at_ms = (at - killed_at).total_seconds() * 1000
        # The log has whole milliseconds.
        if at_ms >= -1.0:
            found.append(Event(match[2], round(max(at_ms, 0.0), 3), dict(_FIELD.findall(match[3]))))
    return found


def phases(found: Iterable[Event]) -> Phases:
    """What became of all sessions that were interrupted."""
    found = list(found)
    interrupted = [event for event in found if event.name == "interrupted"]
    restored = [event for event in found if event.name == "restored"]
    resumed = [event for event in found if event.name == "resumed"]
    seconds = [float(event.fields.get("seconds", 0)) for event in restored]
    copied = sum(int(event.fields.get("bytes", 0)) for event in restored)
    began = [event.at_ms - 1000 * took_s for event, took_s in zip(restored, seconds, strict=True)]
    span_ms = max(event.at_ms for event in restored) - min(began) if restored else 0.0
    return Phases(
        sessions=len(interrupted),
        detection_ms=min((event.at_ms for event in interrupted), default=None),
        interrupted_last_ms=max((event.at_ms for event in interrupted), default=None),
        restored_first_ms=min((event.at_ms for event in restored), default=None),
        restored_last_ms=max((event.at_ms for event in restored), default=None),
        copied_bytes=copied,
        copy_p50_ms=round(1000 * percentile(seconds, 50), 3) if seconds else None,
        copy_max_ms=round(1000 * max(seconds), 3) if seconds else None,
        copy_gb_per_s=round(copied / span_ms / 1e6, 2) if span_ms > 0 else None,
        reasons=_counts(interrupted, "reason"),
        outcomes=_counts(resumed, "outcome"),
        details=_counts(resumed, "detail"),
        lifeline_ms=min((event.at_ms for event in found if event.name == "death"), default=None),
    )


def _counts(found: Iterable[Event], name: str) -> dict[str, int]:
    return dict(sorted(Counter(event.fields.get(name, "") for event in found).items()))
