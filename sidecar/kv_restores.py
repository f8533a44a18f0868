"""What the coordinator asks of the mover: restores, verification, stored snapshots. Every answer is an answer.

Owns the counting of restores. A mover that is slow, gone or unwilling costs a session its KV, never its stream.
"""

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..session.errors import Refused
from ..session.ids import SessionId
from .choice import Tier
from .metrics import Metrics
from .mover.protocol import MoverError, RestoreResult, SnapshotResult, StoredResult, VerifyResult
from .mover.protocol import Reason as MoverReason
from .session_record import Record

_LOG = logging.getLogger("midstream.coordinator")

ASK_AGAIN_S = 0.1


class Mover(Protocol):
    """What the coordinator asks of the mover process (mover/client.py). Each call raises MoverError."""

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
    ) -> RestoreResult:
        """Fill a waiting session's blocks."""
        ...

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        """Compare a session's blocks with their checksums."""
        ...

    async def stored(self, session: SessionId) -> StoredResult:
        """The snapshot on disk that a restore would use."""
        ...

    async def snapshot(self, arena: Path, session: SessionId | None = None) -> SnapshotResult:
        """Store what there is of a session now."""
        ...

    async def finish(self, session: SessionId, generation: int) -> None:
        """What is stored of a session may go first."""
        ...


class KvRestores:
    """The mover as the coordinator uses it."""

    def __init__(self, mover: Mover, metrics: Metrics, *, stores: bool, load_timeout_s: float) -> None:
        self._mover = mover
        self._metrics = metrics
        self.stores = stores
        self._load_timeout_s = load_timeout_s

    async def restore(self, record: Record, tier: Tier) -> RestoreResult:
        """Have the mover fill the new owner's blocks; in place it is needed only for blocks that were shared."""
        source, target = record.source, record.owner
        assert target.epoch.arena_path is not None
        from_arena = None
        if tier is not Tier.DISK:
            assert source.epoch.arena_path is not None
            from_arena = (source.epoch.arena_path, source.generation)
        deadline = time.monotonic() + self._load_timeout_s
        left_s = self._load_timeout_s
        while True:
            try:
                result = await self._mover.restore(
                    record.facts.session,
                    origin=source.session,
                    source=from_arena,
                    to_arena=target.epoch.arena_path,
                    to_generation=target.generation,
                    deadline_s=left_s,
                )
            except MoverError as error:
                result = RestoreResult(False, reason=error.reason.value, error=str(error))
            left_s = deadline - time.monotonic() - ASK_AGAIN_S
            if result.reason != MoverReason.UNREACHABLE or left_s <= 0:
                break
            # A mover that died is started again at once, and the engine waits for its KV for as long as this.
            await asyncio.sleep(ASK_AGAIN_S)
        if result.ok:
            self._metrics.restore_s.observe(result.seconds)
        elif tier is not Tier.IN_PLACE:
            self._metrics.restores_refused.labels(result.reason).inc()
            _LOG.warning(
                "event=restore session=%s worker=%s generation=%d tier=%s reason=%s error=%s",
                record.facts.session, target.epoch.worker, target.generation, tier.value, result.reason,
                result.error,
            )  # fmt: skip
        return result

    async def stored(self, record: Record) -> StoredResult | None:
        """The snapshot on disk that a restore would use, or None."""
        if not self.stores:
            return None
        try:
            found = await self._mover.stored(record.source.session)
        except MoverError as error:
            _LOG.warning("event=stored session=%s error=%s", record.facts.session, error)
            return None
        return found if found.found else None

    async def snapshot(self, record: Record) -> StoredResult:
        """Store a session now, and say what is stored of it then. Raises Refused."""
        arena = record.owner.epoch.arena_path
        if not self.stores or arena is None:
            raise Refused("no_store", "this sidecar stores no snapshots; start it with --store-dir")
        try:
            await self._mover.snapshot(arena, record.facts.session)
            found = await self._mover.stored(record.facts.session)
        except MoverError as error:
            raise Refused(error.reason.value, str(error)) from error
        if not found.found:
            raise Refused(
                "no_snapshot", f"session {record.facts.session}: it has no complete KV to store yet; ask again"
            )
        return found

    async def verified(self, record: Record) -> bool:
        """In place nothing is copied, so the bytes are compared with their checksums before they are used."""
        source = record.source
        if source.epoch.arena_path is None:
            return False
        slot = source.slot()
        needed = 0 if slot is None else slot.prompt_len + max(len(record.known) - 1, 0)
        try:
            checked = await self._mover.verify(source.epoch.arena_path, record.facts.session, source.generation)
        except MoverError as error:
            # Unverifiable is not damaged: the mover may just have been restarted and have no checksums.
            _LOG.warning("event=verify session=%s error=%s", record.facts.session, error)
            return error.reason in (MoverReason.UNREACHABLE, MoverReason.DEADLINE)
        good = checked.tokens
        if good < needed:
            _LOG.error(
                "event=verify session=%s worker=%s good=%d needed=%d",
                record.facts.session, record.source.epoch.worker, good, needed,
            )  # fmt: skip
        return good >= needed

    async def finished(self, record: Record) -> None:
        """What is stored of a session that is over may go first."""
        if self.stores:
            with suppress(MoverError):
                await self._mover.finish(record.facts.session, record.tracker.generation)
