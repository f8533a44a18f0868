"""A simulated mover: the rules of docs/formats.md over simulated pools, and faults of every kind.

It takes sums of full blocks as they fill, copies block by block with pauses between, stores snapshots, keeps full
blocks in memory, answers each restore once, and goes on after its caller has lost interest, as the real one does.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midstream.session.arena import ArenaReader, LoadState, Slot, SlotState
from midstream.session.errors import ArenaError
from midstream.session.ids import SessionId
from midstream.sidecar.mover.protocol import MoverError, Reason, RestoreResult, StoredResult, VerifyResult

from .sim_engine import BLOCK_TOKENS, Cell, SimPool

Block = list[Cell | None]
# As docs/formats.md has it: these say that the KV is no good where it was looked for.
UNFIT = frozenset({Reason.CHECKSUM, Reason.POOL, Reason.FINISHED, Reason.SESSION, Reason.CORRUPT})
ANSWER_LATER_S = 0.25


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is stored of a session."""

    generation: int
    prompt_len: int
    prompt_hash: str
    kv_len: int
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...]


class SimMover:
    """`pool_of` finds the pool of an arena, or None when nobody holds it any more."""

    def __init__(
        self,
        rng: random.Random,
        pool_of: Callable[[Path], SimPool | None],
        fault_rate: float,
        keeping: random.Random | None = None,
    ) -> None:
        self._rng = rng
        self._pool_of = pool_of
        self._fault_rate = fault_rate
        self._readers: dict[Path, ArenaReader] = {}
        self._sums: dict[tuple[Path, SessionId, int, int, int], Block] = {}
        self._store: dict[SessionId, Snapshot] = {}
        # What is kept in memory, if anything is; `keeping` is the chance of it.
        self._keeping = keeping
        self._kept: dict[SessionId, Snapshot] = {}
        self._work: set[asyncio.Task[RestoreResult]] = set()
        self.finished: list[SessionId] = []

    # ---- what the coordinator asks

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId | None = None,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_memory: bool = False,
    ) -> RestoreResult:
        await asyncio.sleep(self._rng.uniform(0, 0.01))
        self._maybe_unreachable()
        work = asyncio.create_task(self._restore(session, source, to_arena, to_generation, deadline_s, from_memory))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.shield(work)

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        self._maybe_unreachable()
        reader, pool = self._reader(arena), self._pool(arena)
        slot = reader.find(session, generation)
        if slot is None:
            raise MoverError(Reason.SESSION, "it is not there")
        covered = _covered(reader, slot)
        table = reader.table(slot)
        good = covered
        for ordinal in range(covered // BLOCK_TOKENS):
            known = self._sums.get((arena, session, generation, table.generation, ordinal))
            if known is not None and known != pool.blocks[table.blocks[ordinal]]:
                good = min(good, ordinal * BLOCK_TOKENS)
        return VerifyResult(good, 0, 0, 0, int(good < covered))

    async def stored(self, session: SessionId) -> StoredResult:
        await asyncio.sleep(self._rng.uniform(0, 0.01))
        self._maybe_unreachable()
        found = self._store.get(session)
        if found is None:
            return StoredResult(False)
        return StoredResult(
            True, found.generation, found.prompt_len, found.prompt_hash, found.kv_len, len(found.outputs)
        )

    async def kept(self, session: SessionId) -> StoredResult:
        await asyncio.sleep(0.001)
        self._maybe_unreachable()
        found = self._kept.get(session)
        if found is None:
            return StoredResult(False)
        return StoredResult(
            True, found.generation, found.prompt_len, found.prompt_hash, found.kv_len, len(found.outputs)
        )

    async def finish(self, session: SessionId, generation: int) -> None:
        self._maybe_unreachable()
        self.finished.append(session)
        self._store.pop(session, None)
        self._kept.pop(session, None)

    # ---- what it does by itself

    def observe(self, arena: Path, *, store: bool) -> None:
        """Take sums of blocks that are full, and store snapshots."""
        pool = self._pool_of(arena)
        if pool is None:
            return
        reader = self._reader(arena)
        for slot in reader.slots():
            covered = _covered(reader, slot) if slot.state is SlotState.LIVE else 0
            table = reader.table(slot)
            for ordinal in range(covered // BLOCK_TOKENS):
                key = (arena, slot.session, slot.generation, table.generation, ordinal)
                self._sums.setdefault(key, list(pool.blocks[table.blocks[ordinal]]))
            if covered and self._keeping is not None and self._keeping.random() < 0.7:
                self._keep(arena, reader, slot, covered // BLOCK_TOKENS)
            if store and covered and self._rng.random() < 0.5:
                count = -(-covered // BLOCK_TOKENS)
                self._store[slot.session] = Snapshot(
                    slot.generation,
                    slot.prompt_len,
                    slot.prompt_hash,
                    covered,
                    tuple(reader.journal(slot)[: covered - slot.prompt_len + 1]),
                    tuple(list(pool.blocks[b]) for b in table.blocks[:count]),
                )

    def forget_sums(self) -> None:
        """It was killed and started again."""
        self._sums.clear()

    def release(self, arena: Path) -> None:
        """Nothing is restored from there any more."""
        reader = self._readers.pop(arena, None)
        if reader is not None:
            reader.close()

    async def close(self) -> None:
        """End what runs."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for arena in list(self._readers):
            self.release(arena)

    # ---- one restore

    async def _restore(
        self,
        session: SessionId,
        source: tuple[Path, int] | None,
        to_arena: Path,
        generation: int,
        deadline_s: float,
        from_memory: bool,
    ) -> RestoreResult:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        slot: Slot | None = None
        try:
            slot = await self._waiting(session, to_arena, generation, deadline)
            began = loop.time()
            if self._rng.random() < self._fault_rate:
                raise MoverError(self._rng.choice([Reason.CHECKSUM, Reason.INTERNAL, Reason.CORRUPT]), "a fault")
            tokens = await self._copy(slot, source, to_arena, deadline, from_memory)
        except (MoverError, ArenaError) as error:
            reason = error.reason if isinstance(error, MoverError) else Reason.ARENA
            unfit = reason in UNFIT and (source is not None or from_memory)
            kept = self._kept.get(session) if unfit else None
            if slot is not None and kept is not None:
                loop.call_later(ANSWER_LATER_S, self._answer_later, slot, to_arena)
            elif slot is not None and to_arena in self._readers:
                self._readers[to_arena].answer(slot, LoadState.FAILED, 0)
            tokens = 0 if kept is None else kept.kv_len
            return RestoreResult(False, reason=reason.value, error=str(error), kept_tokens=tokens)
        self._reader(to_arena).answer(slot, LoadState.DONE, tokens)
        return RestoreResult(True, tokens, seconds=loop.time() - began)

    def _answer_later(self, slot: Slot, arena: Path) -> None:
        """What an engine is told that nobody has left meanwhile."""
        now = self._readers[arena].refresh(slot) if arena in self._readers else None
        if now is not None and now.load is LoadState.WAITING:
            self._readers[arena].answer(slot, LoadState.FAILED, 0)

    def _keep(self, arena: Path, reader: ArenaReader, slot: Slot, count: int) -> None:
        """Keep full blocks that are what they were when they filled; more of them, or those of a newer owner."""
        pool, table = self._pool(arena), reader.table(slot)
        blocks: list[Block] = []
        for ordinal in range(count):
            raw = list(pool.blocks[table.blocks[ordinal]])
            if raw != self._sums.get((arena, slot.session, slot.generation, table.generation, ordinal)):
                break
            blocks.append(raw)
        kv_len = len(blocks) * BLOCK_TOKENS
        known = self._kept.get(slot.session)
        if kv_len < slot.prompt_len or (known is not None and known.generation > slot.generation):
            return
        outputs = tuple(reader.journal(slot)[: kv_len - slot.prompt_len + 1])
        self._kept[slot.session] = Snapshot(
            slot.generation, slot.prompt_len, slot.prompt_hash, kv_len, outputs, tuple(blocks)
        )

    async def _waiting(self, session: SessionId, arena: Path, generation: int, deadline: float) -> Slot:
        while asyncio.get_running_loop().time() < deadline:
            slot = self._reader(arena).find(session, generation)
            if slot is not None and slot.load is LoadState.WAITING:
                return slot
            if slot is not None and (slot.state is not SlotState.LIVE or slot.load is not LoadState.NONE):
                raise MoverError(Reason.GONE, "it waits no longer")
            await asyncio.sleep(0.003)
        raise MoverError(Reason.DESTINATION, "no room was made")

    async def _copy(
        self, slot: Slot, source: tuple[Path, int] | None, to_arena: Path, deadline: float, from_memory: bool
    ) -> int:
        to = self._reader(to_arena)
        outputs = to.journal(slot)
        tokens = slot.prompt_len + len(outputs) - 1
        blocks = to.table(slot).blocks[: -(-tokens // BLOCK_TOKENS)]
        target = self._pool(to_arena)
        slow_s = self._rng.choice([0.0, 0.002, 0.2])
        raws = self._blocks(slot, outputs, tokens, source, from_memory)
        for ordinal, (block, raw) in enumerate(zip(blocks, raws, strict=True)):
            now = self._reader(to_arena).refresh(slot)
            late = asyncio.get_running_loop().time() >= deadline
            if now is None or now.load is not LoadState.WAITING or now.state is not SlotState.LIVE or late:
                raise MoverError(Reason.GONE, f"it was given up at block {ordinal}")
            target.blocks[block][:] = raw()
            await asyncio.sleep(slow_s)
        if source is not None:
            reader = self._reader(source[0])
            before = reader.find(slot.session, source[1])
            if before is None or before.state is not SlotState.LIVE:
                raise MoverError(Reason.FINISHED, "the old one ended meanwhile")
            self._pool(source[0])
        now = self._reader(to_arena).refresh(slot)
        if now is None or now.load is not LoadState.WAITING or now.state is not SlotState.LIVE:
            raise MoverError(Reason.GONE, "it waits no longer")
        return tokens

    def _blocks(
        self, slot: Slot, outputs: list[int], tokens: int, source: tuple[Path, int] | None, from_memory: bool
    ) -> list[Callable[[], Block]]:
        """How to get each block that is to be copied."""
        count = -(-tokens // BLOCK_TOKENS)
        if source is None:
            stored = (self._kept if from_memory else self._store).get(slot.session)
            if stored is None or stored.kv_len < tokens or list(stored.outputs[: len(outputs)]) != outputs:
                raise MoverError(Reason.STORE, "nothing that fits is stored")
            return [lambda block=block: block for block in stored.blocks[:count]]  # type: ignore[misc]
        arena, generation = source
        reader, pool = self._reader(arena), self._pool(arena)
        old = reader.find(slot.session, generation)
        if old is None:
            raise MoverError(Reason.SESSION, "it is not there")
        if _covered(reader, old) < tokens:
            raise MoverError(Reason.INCOMPLETE, "not so many positions have KV")
        if reader.journal(old)[: len(outputs)] != outputs:
            raise MoverError(Reason.TOKENS, "other tokens were journaled")
        table = reader.table(old)

        def checked(ordinal: int) -> Block:
            raw = list(pool.blocks[table.blocks[ordinal]])
            known = self._sums.get((arena, slot.session, generation, table.generation, ordinal))
            if (ordinal + 1) * BLOCK_TOKENS <= tokens and known is not None and known != raw:
                raise MoverError(Reason.CHECKSUM, f"block {ordinal} differs")
            return raw

        return [lambda n=n: checked(n) for n in range(count)]  # type: ignore[misc]

    def _maybe_unreachable(self) -> None:
        if self._rng.random() < self._fault_rate:
            raise MoverError(self._rng.choice([Reason.UNREACHABLE, Reason.DEADLINE, Reason.INTERNAL]), "it is down")

    def _reader(self, arena: Path) -> ArenaReader:
        if arena not in self._readers:
            try:
                self._readers[arena] = ArenaReader(arena)
            except ArenaError as error:
                raise MoverError(Reason.ARENA, str(error)) from error
        return self._readers[arena]

    def _pool(self, arena: Path) -> SimPool:
        pool = self._pool_of(arena)
        if pool is None:
            raise MoverError(Reason.POOL, "nobody holds it")
        return pool


def _covered(reader: ArenaReader, slot: Slot) -> int:
    """Positions that have KV (docs/formats.md)."""
    journaled = len(reader.journal(slot))
    if slot.state is not SlotState.LIVE or slot.load is LoadState.WAITING or not journaled:
        return 0
    if journaled > slot.resumed:
        return slot.prompt_len + journaled - 1
    return slot.loaded if slot.load is LoadState.DONE else 0
