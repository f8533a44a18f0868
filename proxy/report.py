"""How a session's takeovers are told to the client that asked for it. Pure."""

from dataclasses import dataclass

from .coordinator import Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """What happened to a session: the outcome of its last takeover, how many there were, and the longest gap."""

    outcome: Outcome | None = None
    takeovers: int = 0
    gap_s_max: float = 0.0

    def after(self, outcome: Outcome, gap_s: float) -> "Report":
        """The report after one more takeover; a session is only as exact as its least exact takeover."""
        worst = outcome if self.outcome in (None, Outcome.EXACT) else self.outcome
        return Report(worst, self.takeovers + 1, max(self.gap_s_max, gap_s))

    def comment(self) -> str:
        """The trailer's text."""
        outcome = self.outcome.value if self.outcome is not None else "undisturbed"
        return f"midstream outcome={outcome} takeovers={self.takeovers} gap_ms={self.gap_s_max * 1000:.1f}"
