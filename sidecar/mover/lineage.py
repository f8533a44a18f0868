"""Which sessions' KV was computed again from outputs that were re-entered, by this owner or by one before it.

Owns what this mover knows of that: an engine's record tells of its own computing, and each restore hands it on. Such KV
is sound, and a run that goes on with it may differ from the one that was interrupted: where nobody else can tell, as on
another node, its snapshots do. Bounded: of the oldest it is forgotten.
"""

from collections import OrderedDict

from ...session.ids import SessionId
from ...session.records import LoadState, Slot

OWNERS_MAX = 65_536


class Lineage:
    """The owners whose KV descends from such KV."""

    def __init__(self) -> None:
        self._descend: OrderedDict[tuple[SessionId, int], None] = OrderedDict()

    def note(self, session: SessionId, generation: int) -> None:
        """What this owner is given descends from such KV."""
        self._descend[session, generation] = None
        if len(self._descend) > OWNERS_MAX:
            self._descend.popitem(last=False)

    def descends(self, session: SessionId, generation: int) -> bool:
        """Whether what this owner was given does."""
        return (session, generation) in self._descend

    def is_again(self, slot: Slot) -> bool:
        """Whether the KV of a record was computed again, or descends from such KV."""
        return computed_again(slot) or self.descends(slot.session, slot.generation)


def computed_again(slot: Slot) -> bool:
    """Whether an engine has itself computed the KV of outputs that it was told; of the newest one there is none yet."""
    return slot.resumed > 1 and slot.load is not LoadState.DONE
