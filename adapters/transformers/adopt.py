"""Taking over the pool of the engine that ran here before: whose blocks must not be touched, and for how long.

Owns the reading of the old arena and the reservations that come of it. Invariants: a pool is taken over only when
nothing is left of the engine that had it; what is offered for a session is complete: a position counts only if the
old engine had journaled a token that was computed after it. A session's blocks stay reserved until they are resumed,
given up, their arena is removed, or HOLD_S have passed. The decode thread gives blocks back; this module only says
which.
"""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.arena import ArenaReader
from ...session.errors import ArenaError, MidstreamError, PoolError
from ...session.held import HolderClient
from ...session.ids import SessionId
from ...session.key import CompatibilityKey
from ...session.layout import PoolLayout, PoolMeta
from ...session.records import SlotState, complete_kv_len
from ..alive import require_gone
from .extents import Run

HOLD_S = 120.0
LOOK_EVERY_S = 1.0

log = logging.getLogger("midstream.transformers")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A session of the old engine: its blocks, and how many positions of them hold finished KV."""

    session: SessionId
    run: Run
    prompt_len: int
    prompt_hash: str
    outputs: tuple[int, ...]
    covered: int

    def positions_for(self, prompt_len: int, prompt_hash: str, outputs: tuple[int, ...]) -> int:
        """Positions of this session's KV that are valid for a resume with these tokens; 0 for another's tokens."""
        if (prompt_len, prompt_hash) != (self.prompt_len, self.prompt_hash):
            return 0
        if not outputs or outputs != self.outputs[: len(outputs)]:
            return 0
        return min(self.covered, prompt_len + len(outputs) - 1)


@dataclass(frozen=True, slots=True)
class OldPool:
    """What was found of the old engine: its pool's name and descriptor, and its sessions."""

    name: str
    fd: int
    reservations: tuple[Reservation, ...]


def find_old_pool(arena: Path, holder: HolderClient, layout: PoolLayout, key: Mapping[str, Any]) -> OldPool:
    """The pool and sessions of the engine that wrote `arena`. Raises MidstreamError when they cannot be used here."""
    reader = ArenaReader(arena)
    try:
        facts = reader.facts()
        if facts is None or not facts.get("pools"):
            raise ArenaError(f"arena {arena}: its engine never published a pool; starting with an empty one")
        differing = _difference(facts.get("key"), key)
        if differing:
            raise PoolError(f"arena {arena}: the key differs in {', '.join(differing)}; starting with an empty pool")
        require_gone(facts)
        name = str(facts["pools"][0])
        fd, body = holder.get(name)
        try:
            meta = PoolMeta.from_json(body)
            if meta.layout != layout or meta.fingerprint != layout.fingerprint():
                raise PoolError(f"pool {name}: another layout than this engine's; starting with an empty pool")
        except MidstreamError:
            os.close(fd)
            raise
        return OldPool(name, fd, tuple(_reservations(reader, layout)))
    finally:
        reader.close()


def _difference(old: object, ours: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return CompatibilityKey.from_json(old).difference(CompatibilityKey(dict(ours)))
    except ValueError as error:
        raise PoolError(f"old engine: {error}; starting with an empty pool") from error


def _reservations(reader: ArenaReader, layout: PoolLayout) -> list[Reservation]:
    found: dict[SessionId, Reservation] = {}
    # In the order of generations, so that of two owners of a session the newer one counts.
    for slot in sorted(reader.slots(), key=lambda slot: slot.generation):
        # A finished session's table was voided before its blocks became another's.
        if slot.state is not SlotState.LIVE:
            continue
        journal = tuple(reader.journal(slot))
        try:
            run = Run.of_table(reader.table(slot).blocks)
        except ArenaError as error:
            log.warning("event=not_adopted session=%s error=%s", slot.session, error)
            continue
        covered = complete_kv_len(slot, len(journal))
        if run is None or run.end > layout.block_count or not 0 < covered <= run.count * layout.block_tokens:
            log.info("event=not_adopted session=%s reason=nothing_complete covered=%d", slot.session, covered)
            continue
        found[slot.session] = Reservation(slot.session, run, slot.prompt_len, slot.prompt_hash, journal, covered)
    return list(found.values())


class Reservations:
    """The sessions that may still come back, with the time until which their blocks wait. Any thread may call."""

    def __init__(self, found: tuple[Reservation, ...] = (), *, now_s: float = 0.0, arena: Path | None = None) -> None:
        """`arena` is the old engine's: its sidecar removes it when none of its sessions can come back any more."""
        self._lock = threading.Lock()
        self._waiting = {r.session: r for r in found}
        self._until_s = now_s + HOLD_S
        self._arena = arena
        self._next_look_s = now_s
        self._given_up: list[Run] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def peek(self, session: SessionId) -> Reservation | None:
        """The reservation of a session, if it has one."""
        with self._lock:
            return self._waiting.get(session)

    def take(self, session: SessionId) -> Reservation | None:
        """The reservation of a session; its blocks are the caller's now."""
        with self._lock:
            return self._waiting.pop(session, None)

    def give_up(self, session: SessionId) -> bool:
        """A session that will not come back; False when there is no such reservation."""
        with self._lock:
            reservation = self._waiting.pop(session, None)
            if reservation is not None:
                self._given_up.append(reservation.run)
            return reservation is not None

    def returned(self, now_s: float) -> list[Run]:
        """Runs that became free since the last call: given up, or waited for too long."""
        with self._lock:
            if self._waiting and (now_s >= self._until_s or self._is_over(now_s)):
                log.info("event=reservations_ended sessions=%d", len(self._waiting))
                self._given_up.extend(r.run for r in self._waiting.values())
                self._waiting.clear()
            given_up, self._given_up = self._given_up, []
            return given_up

    def _is_over(self, now_s: float) -> bool:
        if self._arena is None or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        return not self._arena.exists()
