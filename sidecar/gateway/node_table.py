"""The nodes of a gateway: what is known of each, and who is not to be asked for a while.

Owns the list, the counts of sessions and the suspicions. Invariants: the loss of a node is told of once, and before
that it is in no list of those that are ready; a suspicion ends by an answer to a question that was asked after it, or
in time. It asks nobody: a source (`node_watch`, `picture_watch`) says what it sees. Time is an argument.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from ..fleet.record import Record
from .nodes import Node

_LOG = logging.getLogger("midstream.gateway")

# A node whose connections broke is most likely dying; so long nothing is begun there while there are others.
SUSPECT_S = 3.0


class NodeTable:
    """`on_lost`: told of a node whose sessions have to go on elsewhere; `on_change`: something else is known."""

    def __init__(self, *, on_lost: Callable[[str], None], on_change: Callable[[], None]) -> None:
        self._nodes: dict[str, Node] = {}
        self._suspects: dict[str, tuple[float, float]] = {}
        self._on_lost = on_lost
        self._on_change = on_change
        # Set by a source that can ask a node out of turn.
        self.ask_soon: Callable[[str], None] = lambda node: None

    # ---- told by a source

    def add(self, node: str, url: str) -> None:
        """A node of which nothing is known yet."""
        self._nodes.setdefault(node, Node(node, url))

    def heard(self, node: str, url: str, record: Record, *, asked_s: float) -> None:
        """A node has said how it is, asked at `asked_s`."""
        known = self._nodes.get(node) or Node(node, url)
        suspicion = self._suspects.get(node)
        was_suspect = suspicion is not None and suspicion[0] < asked_s
        if was_suspect:
            del self._suspects[node]
        if known.record != record or known.why or was_suspect:
            if known.record is None or known.record.readiness is not record.readiness:
                _LOG.info("event=node node=%s readiness=%s", node, record.readiness.value)
            self._nodes[node] = replace(known, url=url, record=record, why="")
            self._on_change()
        elif node not in self._nodes:
            self._nodes[node] = known

    def unheard(self, node: str, why: str) -> None:
        """It could not be asked; what was known of it holds for now."""
        known = self._nodes[node]
        if _kind(known.why) != _kind(why):
            _LOG.warning("event=node_silent node=%s why=%s", node, why)
        if known.why != why:
            self._nodes[node] = replace(known, why=why)

    def lost(self, node: str, why: str) -> None:
        """It is not there any more, or not the one that it was."""
        known = self._nodes.get(node)
        if known is None or known.record is None:
            return
        _LOG.warning("event=node_lost node=%s sessions=%d why=%s", node, known.open, why)
        self._nodes[node] = replace(known, record=None, why=why)
        self._on_lost(node)
        self._on_change()

    def gone(self, node: str, why: str) -> None:
        """It is lost for good: nothing of that name comes back."""
        self.lost(node, why)
        self._nodes.pop(node, None)
        self._suspects.pop(node, None)

    # ---- told by the coordinator

    def add_open(self, node: str, more: int) -> None:
        """So many sessions more (or fewer) are there."""
        known = self._nodes.get(node)
        if known is not None:
            self._nodes[node] = replace(known, open=known.open + more)

    def suspect(self, node: str, now_s: float) -> None:
        """It broke something off: is it alive?"""
        if node in self._nodes:
            self._suspects[node] = (now_s, now_s + SUSPECT_S)
            self.ask_soon(node)

    # ---- asked

    def all(self) -> list[Node]:
        """All nodes, as last heard of."""
        return list(self._nodes.values())

    def get(self, node: str) -> Node | None:
        """One of them, if it is there."""
        return self._nodes.get(node)

    def suspects(self, now_s: float) -> frozenset[str]:
        """Who is not to be asked for anything now."""
        for node in [node for node, (_, until_s) in self._suspects.items() if until_s <= now_s]:
            del self._suspects[node]
        return frozenset(self._suspects)


def _kind(why: str) -> str:
    """What stays the same while the figures in it change."""
    return "".join(c for c in why if not c.isdigit())
