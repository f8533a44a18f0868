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
    """A node as this gateway sees it; `open` are the sessions that it has there itself, `record` what it last said."""

    name: str
    url: str
    record: Record | None = None
    open: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sessions."""
        return self.record is not None and self.record.readiness is Readiness.READY

    @property
    def share(self) -> float:
        """How full it is by what this gateway knows."""
        slots = max(self.record.slot_count, 1) if self.record is not None else 1
        return self.open / slots


def choose(
    nodes: Sequence[Node],
    *,
    model: str = "",
    beginning: bytes = b"",
    keys: Collection[str] = (),
    avoid: Collection[str] = (),
) -> Node | None:
    """The node for a session, or None when none is ready for its model.

    `beginning` is what it may have in common with others. `keys`: it had KV of one of these; who can use it comes
    first. `avoid`: nodes that have just failed; not even where there is no other.
    """
    able = [n for n in nodes if n.is_ready and n.name not in avoid and _serves(n, model)]
    able = [n for n in able if _record(n).load is not Load.FULL] or able
    if keys:
        able = [n for n in able if set(keys) & set(_record(n).keys)] or able
    if not able:
        return None
    least = min(able, key=lambda n: (n.share, n.name))
    if not beginning:
        return least
    slots = sum(max(_record(n).slot_count, 1) for n in able)
    mean = (sum(n.open for n in able) + 1) / slots
    roomy = [n for n in able if (n.open + 1) / max(_record(n).slot_count, 1) <= SPREAD * mean] or [least]
    return max(roomy, key=lambda n: _weight(n.name, beginning))


def _record(node: Node) -> Record:
    assert node.record is not None
    return node.record


def _serves(node: Node, model: str) -> bool:
    """A node that names no models is believed to have them all."""
    models = _record(node).models
    return not model or not models or model in models


def _weight(name: str, beginning: bytes) -> bytes:
    return hashlib.blake2b(beginning, key=name.encode(), digest_size=8).digest()
