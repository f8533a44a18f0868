"""Saves a running session in the memory of another node, which is to go on with it.

Owns the two steps of that: a snapshot here, and what of it is missing there. Invariants: the session decodes on all the
while; what is told of its outputs is what the snapshot covers, never more; a session whose end was journaled is not
given away. Everything is bounded: how many are saved at once, and how long each takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from ...session.errors import Refused
from ...session.ids import SessionId
from ..coordinator import SidecarCoordinator

AT_ONCE = 8
# A session of many thousand positions over a slow network; whoever asks may give up earlier.
WITHIN_S = 120.0
# How long a session that was given away may come back to a node that takes nothing else.
LENT_S = 60.0

# Brings the latest snapshot of a session to a peer, within so many seconds; raises Refused.
Bring = Callable[[SessionId, str, float], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a session can go on from. `kv_len` 0: from its outputs alone. `size_bytes` crossed the network."""

    outputs: tuple[int, ...]
    kv_len: int
    generation: int
    size_bytes: int
    seconds: float

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "outputs": list(self.outputs)}


class Saving:
    """`bring` is None where this node has no process that brings snapshots elsewhere."""

    def __init__(self, coordinator: SidecarCoordinator, bring: Bring | None) -> None:
        self._coordinator = coordinator
        self._bring = bring
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def save(self, session: SessionId, to: str, *, last: bool) -> Saved:
        """Save it at `to` ("": nowhere, only say what it has written). Raises Refused.

        `last`: its client waits for this, and the session may come back here afterwards.
        """
        began_s = time.monotonic()
        if not to:
            outputs = self._coordinator.operators.written(session)
            saved = Saved(outputs, 0, 0, 0, 0.0)
        else:
            if self._bring is None:
                raise Refused("no_replicas", "this node brings no snapshots elsewhere; see replicas.memory_bytes")
            async with self._turns:
                stored, outputs = await self._coordinator.operators.stored_now(session)
                there = await self._bring(session, to, WITHIN_S)
            try:
                is_older = (int(there["generation"]), int(there["kv_len"])) < (stored.generation, stored.kv_len)
                size_bytes = int(there["size_bytes"])
            except (KeyError, TypeError, ValueError) as error:
                raise Refused("bad_answer", f"the replica process answered {there}; is it of this version?") from error
            if is_older:
                raise Refused("replaced", f"session {session}: {to} has an older snapshot of it; ask again")
            saved = Saved(outputs, stored.kv_len, stored.generation, size_bytes, time.monotonic() - began_s)
        if last:
            self._coordinator.lend(session, LENT_S)
        return saved
