"""How far one attempt has come: whether what arrives is a replay, or the new owner's own. Pure.

Invariant: nothing that a resumed attempt computed itself is ever called a replay. Where ids are seen, their number
tells; where not, whatever the client does not have may be either.
"""

from enum import StrEnum

from .splice import Step


class Beat(StrEnum):
    """What a read has brought."""

    NOTHING = "nothing"
    REPLAYED = "replayed"
    # Text past what the client had, in the first read that held any: most likely the journal's last tokens.
    PERHAPS_OWN = "perhaps_own"
    OWN = "own"


class Progress:
    """The account of one attempt that was told to re-enter `resumed` outputs."""

    __slots__ = ("_begun", "_knows_ids", "_left")

    def __init__(self, resumed: int, *, knows_ids: bool) -> None:
        self._left = resumed
        self._knows_ids = knows_ids
        self._begun = False

    def take(self, step: Step) -> Beat:
        """Account for one read."""
        if self._knows_ids or not self._left:
            if not step.tokens:
                return Beat.NOTHING
            self._left = max(-1, self._left - step.tokens) if self._knows_ids else 0
            return Beat.OWN if self._left < 0 or not self._knows_ids else Beat.REPLAYED
        if not step.out:
            return Beat.REPLAYED if step.tokens else Beat.NOTHING
        if not self._begun:
            self._begun = True
            return Beat.PERHAPS_OWN
        return Beat.OWN
