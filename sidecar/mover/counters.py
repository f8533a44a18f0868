"""What the mover counts: flat names and numbers, as its status shows them."""

from collections import Counter
from dataclasses import dataclass, field, fields

from .protocol import Reason


@dataclass(slots=True)
class Counters:
    """Only ever grows. Touched from the event loop alone."""

    blocks_summed: int = 0
    sums_dropped: int = 0
    bytes_copied: int = 0
    restores: int = 0
    restores_failed: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    snapshots: int = 0
    snapshots_dropped: int = 0
    snapshot_bytes: int = 0
    requests_refused: int = 0
    watch_errors: int = 0
    failures: Counter[Reason] = field(default_factory=Counter)

    def fail(self, reason: Reason) -> None:
        """Count something that did not happen, by its reason."""
        self.failures[reason] += 1

    def as_fields(self) -> dict[str, int]:
        """All of it, with one `failures_<reason>` a reason."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "failures"}
        return numbers | {f"failures_{reason.value}": self.failures[reason] for reason in Reason}
