"""Which node a session goes to. Pure.

Owns the choice. Invariants: a node that is not ready gets nothing; of those that are, sessions that begin alike go to
the same one as long as it has little more than its share (consistent hashing with bounded loads), so that its prefix
cache is of use; without a common beginning the least busy one is taken.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..fleet.record import Load, Readiness, Record

# How far above the mean a node may be before what begins alike goes elsewhere.
SPREAD = 1.25


@dataclass(frozen=True, slots=True)
class Node:
    """A node as this gateway sees it.

    `id` is one life of it where the source tells these apart, else its name. `open` are the sessions that this gateway
    has there, `record` what it last said, and `why` what was last in the way of asking it.
    """

    id: str
    url: str
    record: Record | None = None
    open: int = 0
    why: str = ""

    @property
    def name(self) -> str:
        """What it is called through all of its lives."""
        return self.id.partition(".")[0]

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sessions."""
        return self.record is not None and self.record.readiness is Readiness.READY

    @property
    def slots(self) -> int:
        """How many sessions it can have."""
        return max(self.record.slot_count, 1) if self.record is not None else 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Digests of the compatibility keys of its workers."""
        return self.record.keys if self.record is not None else ()

    @property
    def state(self) -> str:
        """The word for how it is."""
        if self.record is not None:
            return self.record.readiness.value
        return "lost" if self.why else "unknown"


def choose(
    nodes: Sequence[Node],
    *,
    model: str = "",
    beginning: bytes = b"",
    keys: Collection[str] = (),
    never: Collection[str] = (),
    rather_not: Collection[str] = (),
) -> Node | None:
    """The node for a session, or None when none is ready for its model.

    A model that no node names is for any engine to refuse, and a node that names none is believed to have them all.
    `beginning` is what it has in common with others. `keys`: it had KV of one of these; who can use it comes first.
    `never`: not even where there is no other; `rather_not`: only then.
    """
    able = [n for n in nodes if n.is_ready and n.id not in never]
    if any(_names(n, model) for n in nodes):
        able = [n for n in able if _names(n, model) or not _tells_models(n)]
    able = [n for n in able if n.id not in rather_not] or able
    able = [n for n in able if not _is_full(n)] or able
    able = [n for n in able if not set(keys).isdisjoint(n.keys)] or able
    if not able:
        return None
    least = min(able, key=lambda n: (n.open / n.slots, _is_busy(n), n.id))
    if not beginning:
        return least
    # What all have for each slot, with this session among them.
    mean = (sum(n.open for n in able) + 1) / sum(n.slots for n in able)
    roomy = [n for n in able if n.open + 1 <= SPREAD * mean * n.slots] or [least]
    return max(roomy, key=lambda n: (_weight(n.name, beginning), n.id))


def _is_full(node: Node) -> bool:
    return node.record is not None and node.record.load is Load.FULL


def _is_busy(node: Node) -> bool:
    return node.record is not None and node.record.load is Load.BUSY


def _names(node: Node, model: str) -> bool:
    return node.record is not None and model in node.record.models


def _tells_models(node: Node) -> bool:
    return node.record is not None and bool(node.record.models)


def _weight(name: str, beginning: bytes) -> bytes:
    return hashlib.blake2b(beginning, key=name.encode(), digest_size=8).digest()
