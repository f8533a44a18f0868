"""How a session's takeovers are told to the client that asked for it. Pure."""

from collections.abc import Sequence

from .coordinator import Outcome


def report(outcome: Outcome | None, gaps_s: Sequence[float]) -> str:
    """The trailer's text: the least exact outcome, how many takeovers there were, and the longest gap."""
    name = outcome.value if outcome is not None else "undisturbed"
    return f"midstream outcome={name} takeovers={len(gaps_s)} gap_ms={max(gaps_s, default=0.0) * 1000:.1f}"
