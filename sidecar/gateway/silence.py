"""How long a node has said nothing, by what was really asked of it. Pure: time is an argument.

Owns the account of one node's silence. Invariants: it is counted from the first question that is not answered, and only
time in which an answer could have been read counts, so that a gateway that was stopped itself, or whose machine was,
loses no node for it; a node that was heard begins at 0.
"""

# So much longer than it was to, a question takes only where this process itself did not run.
OVERSLEPT_S = 0.5
_LEAST_S = 1e-3


class Silence:
    """One node's."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._silent_s = 0.0

    @property
    def left_s(self) -> float:
        """For how much longer it may say nothing."""
        return self._lost_after_s - self._silent_s

    @property
    def has_begun(self) -> bool:
        """Whether it has not answered what it was asked last."""
        return self._silent_s > 0

    @property
    def is_lost(self) -> bool:
        """Whether it has said nothing for too long."""
        return self.left_s <= 0

    def heard(self) -> None:
        """It has answered."""
        self._silent_s = 0.0

    def passed(self, took_s: float, at_most_s: float) -> None:
        """Something that was to take `at_most_s` has taken so long, and brought no answer."""
        if took_s <= at_most_s + OVERSLEPT_S:
            # A refusal takes no time at all, and is a silence all the same.
            self._silent_s += max(min(took_s, at_most_s), _LEAST_S)
