"""What the coordinator asks of the mover: restores, verification, stored snapshots. Every answer is an answer.

Owns the counting of restores. A mover that is slow, gone or unwilling costs a session its KV, never its stream. KV in a
GPU's memory is used only after a mover has said that no fault of the GPU may have touched it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..session.errors import Refused
from ..session.ids import SessionId
from .choice import Tier
from .metrics import Metrics
from .mover.protocol import MoverError, RestoreResult, SnapshotResult, StoredResult, VerifyResult
from .mover.protocol import Reason as MoverReason
from .session_record import Place, Record

_LOG = logging.getLogger("midstream.coordinator")

T = TypeVar("T")

ASK_AGAIN_S = 0.1
# A network that does not say what is elsewhere is not waited for longer: the session can be computed meanwhile.
REPLICA_ASK_S = 3.0
# The field of a compatibility key that only engines on a GPU fill in.
_GPU_FIELD = "cuda_runtime"


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
        """Fill a waiting session's blocks, from an arena, or from the store where `source` is None."""
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


@runtime_checkable
class TellsOfFaults(Protocol):
    """A mover that knows which arenas a fault of a GPU may have touched."""

    async def sound(self, arena: Path) -> None:
        """Return if KV may be taken from an arena. Raises MoverError."""
        ...


class KeepsInMemory(Protocol):
    """A mover that copies KV into memory of the host."""

    async def kept(self, session: SessionId) -> StoredResult:
        """What a restore from there would begin with."""
        ...

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_memory: bool,
    ) -> RestoreResult:
        """As `Mover.restore`; `from_memory` instead of from the store."""
        ...


class ReadsElsewhere(Protocol):
    """A mover that is told of snapshots in stores elsewhere."""

    async def replicated(self, session: SessionId) -> StoredResult:
        """What a restore from there would begin with."""
        ...

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_replica: bool,
    ) -> RestoreResult:
        """As `Mover.restore`; `from_replica` instead of from the store."""
        ...


class KvRestores:
    """The mover as the coordinator uses it.

    `memory`, `replicas`: the same mover, if it keeps KV in memory, or is told of snapshots elsewhere.
    """

    def __init__(
        self,
        mover: Mover,
        metrics: Metrics,
        *,
        stores: bool,
        load_timeout_s: float,
        memory: KeepsInMemory | None = None,
        replicas: ReadsElsewhere | None = None,
    ) -> None:
        self._mover = mover
        self._memory = memory
        self._replicas = replicas
        self._metrics = metrics
        self.stores = stores
        self._load_timeout_s = load_timeout_s

    async def restore(self, record: Record, tier: Tier) -> RestoreResult:
        """Have the mover fill the new owner's blocks; in place it is needed only for blocks that were shared."""
        source, target = record.source, record.owner
        assert target.epoch.arena_path is not None
        from_arena = None
        if tier not in (Tier.MEMORY, Tier.DISK, Tier.REPLICA):
            assert source.epoch.arena_path is not None
            from_arena = (source.epoch.arena_path, source.generation)
        deadline = time.monotonic() + self._load_timeout_s
        left_s = self._load_timeout_s
        while True:
            asked: dict[str, Any] = {
                "origin": source.session,
                "source": from_arena,
                "to_arena": target.epoch.arena_path,
                "to_generation": target.generation,
                "deadline_s": left_s,
            }
            try:
                if tier is Tier.MEMORY and self._memory is not None:
                    result = await self._memory.restore(record.facts.session, **asked, from_memory=True)
                elif tier is Tier.REPLICA and self._replicas is not None:
                    result = await self._replicas.restore(record.facts.session, **asked, from_replica=True)
                else:
                    result = await self._mover.restore(record.facts.session, **asked)
            except MoverError as error:
                result = RestoreResult(False, reason=error.reason.value, error=str(error))
            left_s = deadline - time.monotonic() - ASK_AGAIN_S
            if result.reason not in (MoverReason.UNREACHABLE, MoverReason.BUSY) or left_s <= 0:
                break
            # A mover that died is started again at once, one that has many to restore is soon done with some of them,
            # and the engine waits for its KV for as long as this: nobody else tells it anything.
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

    async def kept(self, record: Record) -> StoredResult | None:
        """What is kept in memory that a restore would use, or None."""
        memory = self._memory
        if memory is None:
            return None
        session = record.source.session
        try:
            # The fault that costs a pool costs the mover, too: one that is being started again is waited for.
            found = await self._answered(lambda: memory.kept(session))
        except MoverError as error:
            _LOG.warning("event=kept session=%s error=%s", record.facts.session, error)
            return None
        return found if found.found else None

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

    async def replicated(self, record: Record) -> StoredResult | None:
        """The snapshot elsewhere that a restore would use, or None."""
        if self._replicas is None:
            return None
        try:
            async with asyncio.timeout(REPLICA_ASK_S):
                found = await self._replicas.replicated(record.source.session)
        except (MoverError, TimeoutError) as error:
            why = str(error) or f"no answer within {REPLICA_ASK_S:g} s"
            _LOG.warning("event=replicated session=%s error=%s", record.facts.session, why)
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

    async def untouched(self, record: Record) -> bool:
        """Whether KV that lies on a GPU may be copied from there; asked before a place is chosen for its sake."""
        arena = record.source.epoch.arena_path
        if arena is None or not _on_gpu(record.source) or not isinstance(self._mover, TellsOfFaults):
            return True
        tells = self._mover
        try:
            await self._answered(lambda: tells.sound(arena))
        except MoverError as error:
            if error.reason not in (MoverReason.FAULT, MoverReason.UNREACHABLE, MoverReason.DEADLINE):
                # It is the restore that says what else is wrong.
                return True
            self._metrics.restores_refused.labels(error.reason.value).inc()
            _LOG.warning(
                "event=not_sound session=%s worker=%s reason=%s error=%s",
                record.facts.session, record.source.epoch.worker, error.reason.value, error,
            )  # fmt: skip
            return False
        return True

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the mover says; one that is being started again is asked again. Raises MoverError.

        Of KV on a GPU its silence means nothing good: the fault that ended it may have touched that. It is waited for
        as long as a restore would be.
        """
        deadline = time.monotonic() + self._load_timeout_s
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    return await ask()
            except TimeoutError:
                text = f"the mover did not answer within {self._load_timeout_s:g} s; look at its log"
                raise MoverError(MoverReason.DEADLINE, text) from None
            except MoverError as error:
                silent = error.reason in (MoverReason.UNREACHABLE, MoverReason.DEADLINE)
                if not silent or deadline - time.monotonic() <= ASK_AGAIN_S:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def verified(self, record: Record) -> bool:
        """In place nothing is copied, so the bytes are compared with their checksums before they are used."""
        source = record.source
        arena = source.epoch.arena_path
        if arena is None:
            return False
        on_gpu = _on_gpu(source)
        slot = source.slot()
        needed = 0 if slot is None else slot.prompt_len + max(len(record.known) - 1, 0)
        try:
            if on_gpu:
                checked = await self._answered(
                    lambda: self._mover.verify(arena, record.facts.session, source.generation)
                )
            else:
                checked = await self._mover.verify(arena, record.facts.session, source.generation)
        except MoverError as error:
            _LOG.warning("event=verify session=%s error=%s", record.facts.session, error)
            # Unverifiable is not damaged where nothing but the mover itself can have failed.
            return not on_gpu and error.reason in (MoverReason.UNREACHABLE, MoverReason.DEADLINE)
        good = checked.tokens
        if good < needed:
            _LOG.error(
                "event=verify session=%s worker=%s good=%d needed=%d",
                record.facts.session, record.source.epoch.worker, good, needed,
            )  # fmt: skip
        return good >= needed

    async def finished(self, record: Record) -> None:
        """What is stored of a session that is over may go first."""
        if self.stores or self._memory is not None:
            with suppress(MoverError):
                await self._mover.finish(record.facts.session, record.tracker.generation)


def _on_gpu(place: Place) -> bool:
    """Whether KV there lies in the memory of a GPU, as its engine's key tells."""
    return place.epoch.key is not None and place.epoch.key.fields.get(_GPU_FIELD) is not None
