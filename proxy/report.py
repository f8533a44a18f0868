"""How a session's takeovers are told to the client that asked for it, and those of several sessions as one. Pure.

Owns the wording, in a stream's last comment and in headers: what tells of takeovers is written here, and read back here
where several choices become one answer. Invariant: a report of several sessions names the least exact outcome, all
takeovers together, and the longest gap. It does not know when a report is due.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import headers
from .coordinator import LEAST_EXACT_FIRST, Outcome

UNDISTURBED = "undisturbed"
_WORST_FIRST = (*LEAST_EXACT_FIRST, UNDISTURBED)
# An engine may write comments, too: what is no report of a handler's must not be read as one.
_COMMENT = re.compile(
    rb"\A: midstream outcome=(%s)(?: takeovers=(\d{1,9}) gap_ms=(\d{1,12}\.\d))?\s*\Z" % "|".join(_WORST_FIRST).encode()
)
_COUNT = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one session, or of several; `gap_ms` is unknown where only headers tell."""

    outcome: str
    takeovers: int = 0
    gap_ms: float = 0.0

    def __str__(self) -> str:
        if self.outcome == Outcome.REFUSED:
            return f"midstream outcome={self.outcome}"
        return f"midstream outcome={self.outcome} takeovers={self.takeovers} gap_ms={self.gap_ms:.1f}"

    def headers(self) -> dict[str, str]:
        """The report of an answer that is no stream."""
        return {headers.OUTCOME: self.outcome, headers.TAKEOVERS: str(self.takeovers)}

    @classmethod
    def of_session(
        cls, outcome: Outcome | None, gaps_s: Sequence[float], *, more: int = 0, more_gap_s: float = 0.0
    ) -> "Report":
        """What happened to one session: its least exact outcome, and the gap that each takeover made.

        `more` are takeovers within nodes, of which the longest gap is known.
        """
        name = outcome.value if outcome is not None else UNDISTURBED
        return cls(name, len(gaps_s) + more, max([*gaps_s, more_gap_s]) * 1000)

    @classmethod
    def of_comment(cls, raw: bytes) -> "Report | None":
        """The report in a stream's comment, if it is one."""
        found = _COMMENT.match(raw)
        if found is None:
            return None
        return cls(found[1].decode(), int(found[2] or 0), float(found[3] or 0.0))

    @classmethod
    def of_headers(cls, told: Mapping[str, str]) -> "Report | None":
        """The report in an answer's headers, if there is one."""
        outcome, takeovers = told.get(headers.OUTCOME), told.get(headers.TAKEOVERS, "0")
        if outcome not in _WORST_FIRST or _COUNT.fullmatch(takeovers) is None:
            return None
        return cls(outcome, int(takeovers))

    @classmethod
    def of_all(cls, reports: Sequence["Report"]) -> "Report | None":
        """One report for several sessions; None where nobody told anything."""
        if not reports:
            return None
        worst = min(reports, key=lambda report: _WORST_FIRST.index(report.outcome))
        return cls(worst.outcome, sum(r.takeovers for r in reports), max(r.gap_ms for r in reports))
