"""What happened to several choices, told as one. Pure.

Reads what each choice's handler tells (`report`, for streams and for headers) and says the same of all of them: the
least exact outcome, all takeovers together, and the longest gap.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import headers
from .coordinator import Outcome

UNDISTURBED = "undisturbed"
# Best first: the worst of several is the last of these.
_BY_EXACTNESS = (UNDISTURBED, Outcome.EXACT, Outcome.RECOMPUTED, Outcome.RESTARTED, Outcome.REFUSED)
# An engine may write comments, too: what is no report of a handler's must not be read as one.
_COMMENT = re.compile(
    rb"\A: midstream outcome=(%s)(?: takeovers=(\d{1,9}) gap_ms=(\d{1,12}\.\d))?\s*\Z"
    % "|".join(_BY_EXACTNESS).encode()
)


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
    def of_comment(cls, raw: bytes) -> "Report | None":
        """The report in a stream's comment, if it is one."""
        found = _COMMENT.match(raw)
        if found is None:
            return None
        return cls(found[1].decode(), int(found[2] or 0), float(found[3] or 0.0))

    @classmethod
    def of_headers(cls, told: Mapping[str, str]) -> "Report | None":
        """The report in an answer's headers, if there is one."""
        outcome = told.get(headers.OUTCOME)
        return None if outcome is None else cls(outcome, int(told.get(headers.TAKEOVERS, 0)))

    @classmethod
    def of_all(cls, reports: Sequence["Report"]) -> "Report | None":
        """One report for several sessions; None where nobody told anything."""
        if not reports:
            return None
        worst = max(reports, key=lambda report: _BY_EXACTNESS.index(report.outcome))
        return cls(worst.outcome, sum(r.takeovers for r in reports), max(r.gap_ms for r in reports))
