"""Copies full blocks into tier 1, once, as soon as their sums are known; tails as the policy asks.

Owns what is due and the share of the link. Invariants: a full block is kept only if it is equal to the sum that it had
when it filled, and nothing after one that is not; what was copied is kept only if the session's table was the same
afterwards, and no fault of a GPU came between; a session's blocks are entered in order, whichever call comes back
first. Falls behind rather than take more than its share, and counts by how much. Never the reason for anything else to
stop.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...session.arena import ArenaReader, Slot, SlotState
from ...session.errors import PoolError
from ...session.ids import SessionId
from . import coverage
from .counters import Counters
from .coverage import Covered
from .matching import SessionKv
from .memory_area import Slab
from .memory_index import Chain, Kept
from .memory_records import linked
from .memory_source import story_of
from .memory_tier import MemoryTier
from .pools import Pool
from .protocol import MoverError
from .snapshots import ENDINGS, OVER, SESSIONS_MAX
from .sources import Sources, key_of
from .sums import Owner, Sums
from .way import Way

# Where nothing was due, nothing is looked for again for so long.
ROUND_S = 0.02
# Where there is no room for a session, it is not looked at again for so long.
NO_ROOM_S = 0.25
# Nor is one whose blocks could not be copied.
AGAIN_S = 0.25
# What one call copies: enough that a link is busy, and little enough that a copy never lasts long. While one is on the
# link, what the one before has brought is entered, and the next one is looked for.
BATCH_BYTES = 256 << 20
AT_ONCE = 2
# So many blocks are entered in one go, in a fraction of a millisecond; then others have their turn.
ENTER_BLOCKS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """`bytes_per_s`: the share of the link. `tail_tokens`: after so many new positions a tail is kept; 0: never."""

    bytes_per_s: int
    tail_tokens: int = 0


@dataclass(slots=True)
class _Done:
    """How far a session was looked at, under one table; `damaged`: nothing of it is kept any more.

    The first `blocks` are kept, and of the first `sent` none is to be sent again; `calls` are the parts under way.
    """

    table_generation: int
    blocks: int = 0
    sent: int = 0
    calls: int = 0
    kv_len: int = 0
    damaged: bool = False
    behind: int = 0
    behind_since_s: float = 0.0
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Due:
    """Blocks of a session that are to be copied; of those from ordinal `first` on that are full there are `sums`."""

    done: _Done
    chain: Chain
    covered: Covered
    first: int
    blocks: tuple[int, ...]
    sums: tuple[int, ...]

    def positions(self, index: int, block_tokens: int) -> range:
        """The positions of one of them that mean something."""
        start = (self.first + index) * block_tokens
        end = start + block_tokens
        return range(start, end if index < len(self.sums) else min(end, self.covered.kv_len))

    def entered(self, slabs: Sequence[Slab]) -> int:
        """How many of the slabs that there were for them the chain has by now, which are the first ones."""
        kept = self.chain.blocks[self.first :]
        return sum(one.slab == slab for one, slab in zip(kept, slabs, strict=False))


# What one call copies: of each session its blocks in parts, and the room that there is for the first of them.
_Batch = list[tuple[_Due, list[Slab]]]


class MemorySaver:
    """Follows the watcher's sessions, one arena after the other."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        tier: MemoryTier,
        policy: SavePolicy,
        way: Way | None = None,
    ) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._tier = tier
        self._policy = policy
        self._way = way or Way()
        self._live: dict[Path, list[Slot]] = {}
        self._done: dict[Owner, _Done] = {}
        # From when on there is a share of the link again.
        self._share_s = 0.0
        # Who has each session now, oldest first; an older owner's blocks may be somebody else's by now.
        self._owners: OrderedDict[SessionId, int] = OrderedDict()

    # ---- told by the watcher and the sidecar

    def seen(self, path: Path, slots: list[Slot]) -> None:
        """These sessions are live in an arena now. What is kept of them has sums that outlived the mover before."""
        self._live[path] = slots
        for slot in slots:
            self._own(slot.session, slot.generation)
            owner = (path, slot.session, slot.generation)
            if owner in self._done or self._sums.length(owner):
                continue
            for kind, sums in self._tier.known_sums(slot.session, (slot.generation, slot.table_generation)).items():
                self._sums.add(owner, slot.table_generation, kind, 0, sums)

    def ended(self, path: Path, slot: Slot) -> None:
        """A session is no longer live in an arena."""
        self._done.pop((path, slot.session, slot.generation), None)
        if slot.state is SlotState.FINISHED and slot.finish in ENDINGS:
            self.finish(slot.session, slot.generation)
        else:
            self._left(slot.session, slot.generation)

    def unseen(self, path: Path) -> None:
        """An arena is not followed any more."""
        for slot in self._live.pop(path, ()):
            self._done.pop((path, slot.session, slot.generation), None)
            self._left(slot.session, slot.generation)

    def finish(self, session: SessionId, generation: int) -> None:
        """A session is over, unless it is of a newer generation."""
        if self._owners.get(session, 0) <= generation:
            self._own(session, OVER)
            self._tier.finish(session, generation)

    def behind(self) -> dict[str, int | float]:
        """What is to be copied and was not yet."""
        blocks = size_bytes = 0
        since_s = now = time.monotonic()
        for (path, *_), done in self._done.items():
            pool = self._sources.mapped(path)
            if done.behind and pool is not None:
                blocks += done.behind
                size_bytes += done.behind * pool.layout.block_bytes
                since_s = min(since_s, done.behind_since_s)
        return {
            "tier1_behind_blocks": blocks,
            "tier1_behind_bytes": size_bytes,
            "tier1_behind_s": round(now - since_s, 3),
        }

    # ---- the work

    async def run(self) -> None:
        """Copy what is due until cancelled."""
        running: list[asyncio.Task[int]] = []
        try:
            while True:
                sent = False
                for path in list(self._live):
                    while len(running) >= AT_ONCE:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        running = [call for call in running if not call.done()]
                    await self._share()
                    await self._way.make()
                    call = self._begin(path, running[-1] if running else None)
                    if call is not None:
                        running.append(call)
                        sent = True
                if not sent:
                    await asyncio.sleep(ROUND_S)
        finally:
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, path: Path, before: "asyncio.Task[int] | None") -> "asyncio.Task[int] | None":
        """A call under way for what is due in an arena, if anything is; `before` is the one that was begun last."""
        try:
            due = self._collect(path)
        except MoverError:
            # What is wrong with an arena or its pool the watcher says.
            return None
        except Exception:
            self._failed(path)
            return None
        return asyncio.create_task(self._carried_out(path, due, before)) if due else None

    async def _carried_out(self, path: Path, due: _Batch, before: "asyncio.Task[int] | None") -> int:
        try:
            return await self._save(path, due, before)
        except MoverError:
            # What was copied is counted as dropped.
            return 0
        except Exception:
            self._failed(path)
            return 0

    def _failed(self, path: Path) -> None:
        self._counters.watch_errors += 1
        _log.exception("event=tier1_failed arena=%s", path)

    async def turn(self, path: Path) -> int:
        """Copy what is due in an arena, in one call; returns how many blocks are kept of it. Raises MoverError."""
        due = self._collect(path)
        if not due:
            return 0
        kept = await self._save(path, due, None)
        await self._share()
        return kept

    async def _share(self) -> None:
        """Wait until there is a share of the link again."""
        pause_s = self._share_s - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)

    def _collect(self, path: Path) -> _Batch:
        """What one call is to copy of an arena, and room for it; all of it is under way from then on. MoverError."""
        slots, pool = self._live.get(path, []), self._sources.mapped(path)
        # Asked also while there is no session yet: the first one must not wait until the area is pinned.
        if pool is None or not self._sources.is_untouched(path) or not self._tier.ready_for(pool) or not slots:
            return []
        began = time.monotonic()
        reader = self._sources.reader(path)
        left = max(1, min(BATCH_BYTES, self._policy.bytes_per_s) // pool.layout.block_bytes)
        due: _Batch = []
        for slot in self._by_need(path, slots):
            try:
                found = self._look(path, reader, pool, slot, left)
            except MoverError:
                # It ended, or was given other blocks, while it was looked at; the next turn sees what it is now.
                continue
            slabs = self._tier.room(found.chain, found.first, len(found.blocks)) if found is not None else []
            if found is not None and slabs:
                due += _in_parts(found, slabs)
                found.done.sent = found.first + min(len(slabs), len(found.sums))
                left -= len(slabs)
            elif found is not None:
                found.done.not_before_s = time.monotonic() + NO_ROOM_S
            if left <= 0:
                break
        for part, _ in due:
            part.done.calls += 1
        size_bytes = pool.layout.block_bytes * sum(len(slabs) for _, slabs in due)
        now = time.monotonic()
        self._share_s = max(self._share_s, now) + size_bytes / self._policy.bytes_per_s
        self._tier.figures.look_s += now - began
        return due

    def _by_need(self, path: Path, slots: Sequence[Slot]) -> list[Slot]:
        """Those that have waited longest first, so that nobody is left behind for good."""

        def since(slot: Slot) -> float:
            done = self._done.get((path, slot.session, slot.generation))
            return done.behind_since_s if done is not None and done.behind else float("inf")

        return sorted(slots, key=since)

    def _look(self, path: Path, reader: ArenaReader, pool: Pool, slot: Slot, count_max: int) -> _Due | None:
        """What is due of a session, `count_max` blocks at most. Raises MoverError."""
        if self._owners.get(slot.session, 0) > slot.generation:
            return None
        owner = (path, slot.session, slot.generation)
        done = self._done.get(owner)
        if done is not None and self._is_settled(owner, done, slot):
            return None
        covered = coverage.read(reader, slot)
        if done is None or done.table_generation != covered.table.generation:
            done = self._done[owner] = _Done(covered.table.generation)
        block_tokens = pool.layout.block_tokens
        sums = self._sums.get(owner, covered.table.generation, pool.sum_kind)[: covered.kv_len // block_tokens]
        chain = self._tier.index.begin(story_of(_kv(reader, pool, slot)), slot.generation)
        chain.live, chain.wanted = True, len(sums)
        self._confirm(done, chain, covered, sums, pool)
        if done.damaged:
            return None
        if done.blocks < len(sums) and not done.behind:
            done.behind_since_s = time.monotonic()
        done.behind = len(sums) - done.blocks
        if not done.calls:
            # Of what was kept some may have been let go.
            done.sent = done.blocks
        first = max(done.sent, done.blocks)
        count = min(len(sums), first + count_max)
        blocks, known = covered.table.blocks[first:count], tuple(sums[first:count])
        if self._wants_tail(done, covered, len(sums), block_tokens) and len(known) == done.behind < count_max:
            blocks += covered.table.blocks[count : count + 1]
        return _Due(done, chain, covered, first, blocks, known) if blocks else None

    def _is_settled(self, owner: Owner, done: _Done, slot: Slot) -> bool:
        """Whether nothing can be done now: most looks end with that.

        It is damaged, or has no room, or what has filled was sent, nothing was let go, and no tail is wanted.
        """
        if done.table_generation != slot.table_generation:
            # Its KV was computed anew: as many sums say nothing of what is kept.
            return False
        if done.damaged:
            return True
        if time.monotonic() < done.not_before_s:
            return True
        chain = self._tier.index.get(owner[1])
        kept = 0 if chain is None else len(chain.full)
        is_sent = self._sums.length(owner) == max(done.sent, done.blocks)
        return not self._policy.tail_tokens and is_sent and done.blocks <= kept

    def _confirm(self, done: _Done, chain: Chain, covered: Covered, sums: Sequence[int], pool: Pool) -> None:
        """Go past blocks that are kept already, as they were under an owner before; drop what is kept of another KV."""
        owner = covered.slot.generation, covered.table.generation
        while done.blocks < min(len(sums), len(chain.full)):
            kept = chain.full[done.blocks]
            tokens = _tokens(covered, done.blocks * pool.layout.block_tokens, pool.layout.block_tokens)
            same = (kept.kind, kept.sum) == (pool.sum_kind, sums[done.blocks])
            if not same and kept.owner == owner:
                # It was full then, so nobody had to write there any more.
                self._damaged(done, chain, done.blocks)
                return
            if not same or kept.chain != linked(chain.before(done.blocks), tokens):
                self._tier.index.cut(chain, done.blocks)
                return
            if kept.owner != owner:
                self._tier.renew(chain, done.blocks, owner)
            done.blocks += 1
        # Blocks may have been let go meanwhile.
        done.blocks = min(done.blocks, len(chain.full))
        for ordinal, kept in enumerate(chain.blocks[done.blocks :], done.blocks):
            # Of an owner before, which had written more: this one may have gone on otherwise.
            tokens = _tokens(covered, ordinal * pool.layout.block_tokens, kept.positions)
            if any(one != other for one, other in zip(tokens, kept.tokens, strict=False)):
                self._tier.index.cut(chain, ordinal)
                return

    def _wants_tail(self, done: _Done, covered: Covered, summed: int, block_tokens: int) -> bool:
        every = self._policy.tail_tokens
        # One that is under way may be this very tail.
        if not every or done.calls:
            return False
        has_tail = covered.kv_len % block_tokens and covered.kv_len // block_tokens == summed
        return bool(has_tail and covered.kv_len - done.kv_len >= every)

    async def _save(self, path: Path, due: _Batch, before: "asyncio.Task[int] | None") -> int:
        """Copy blocks of several sessions in one call; how many are kept. MoverError after a fault of a GPU."""
        kept = 0
        try:
            began = time.monotonic()
            found = await self._copied(path, due)
            self._tier.figures.calls += 1
            self._tier.figures.copy_s += time.monotonic() - began
            if before is not None:
                await asyncio.wait({before})
            at = 0
            await self._way.make()
            while due:
                kept += self._entered(path, *due[0], found[at:])
                at += len(due.pop(0)[1])
                await asyncio.sleep(0)
        except PoolError as error:
            _log.warning("event=tier1_not_copied arena=%s error=%s", path, error)
        finally:
            # What could not be entered, for whatever reason, might not be the next time.
            for one, given in due:
                one.done.not_before_s = time.monotonic() + AGAIN_S
                # Of the first of them a part may have been entered.
                self._drop(one, given, one.entered(given))
        return kept

    async def _copied(self, path: Path, due: _Batch) -> Sequence[int]:
        """Have blocks copied; never returns before the thread has let go of the memory. Raises PoolError."""
        pool = self._sources.mapped(path)
        if pool is None:
            raise PoolError(f"arena {path} was let go of")
        blocks = [block for one, given in due for block in one.blocks[: len(given)]]
        places = self._tier.host_blocks([slab for _, given in due for slab in given], pool.layout.block_bytes)
        copying = asyncio.ensure_future(asyncio.to_thread(pool.save, blocks, places))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait({copying})
            raise

    def _entered(self, path: Path, due: _Due, slabs: Sequence[Slab], found: Sequence[int]) -> int:
        """Enter what was copied for a part of a session; how many blocks are kept. MoverError after a GPU's fault."""
        began = time.monotonic()
        # What was copied before a fault is dropped, too.
        self._sources.check_untouched(path)
        reader, pool = self._sources.reader(path), self._sources.mapped(path)
        if pool is None:
            raise PoolError(f"arena {path} was let go of")
        kept = self._keep(reader, pool, due, slabs, found[: len(slabs)])
        self._tier.figures.enter_s += time.monotonic() - began
        return kept

    def _drop(self, due: _Due, slabs: Sequence[Slab], kept: int) -> None:
        """All but the first `kept` blocks of what was sent for a session are not kept; they may be sent again."""
        due.done.calls -= 1
        if kept < len(slabs):
            due.done.sent = due.done.blocks
            self._tier.figures.blocks_dropped += len(slabs) - kept
            self._tier.give_back(slabs[kept:])

    def _keep(self, reader: ArenaReader, pool: Pool, due: _Due, slabs: Sequence[Slab], found: Sequence[int]) -> int:
        """Enter what was copied for a session, as far as it is what it should be; the rest is given back."""
        kept = 0
        try:
            coverage.check_unchanged(reader, due.covered)
            good = not due.chain.dropped and len(due.chain.full) == due.first
        except MoverError:
            good = False
        if good:
            kept = self._enter(pool, due, slabs, found)
        else:
            # It is looked at anew, from where its chain is then.
            due.done.blocks = 0
        self._drop(due, slabs, kept)
        return kept

    def _enter(self, pool: Pool, due: _Due, slabs: Sequence[Slab], found: Sequence[int]) -> int:
        block_tokens, done = pool.layout.block_tokens, due.done
        owner = due.covered.slot.generation, due.covered.table.generation
        for index, (slab, value) in enumerate(zip(slabs, found, strict=True)):
            if index < len(due.sums) and value != due.sums[index]:
                self._damaged(done, due.chain, due.first + index)
                return index
            positions = due.positions(index, block_tokens)
            tokens = _tokens(due.covered, positions.start, len(positions))
            ordinal = due.first + index
            digest = linked(due.chain.before(ordinal), tokens)
            self._tier.keep(due.chain, ordinal, Kept(slab, owner, len(positions), pool.sum_kind, value, digest, tokens))
            if index < len(due.sums):
                done.blocks, done.behind = done.blocks + 1, done.behind - 1
            done.kv_len = due.chain.kv_len
        if done.behind:
            done.behind_since_s = time.monotonic()
        return len(slabs)

    def _damaged(self, done: _Done, chain: Chain, ordinal: int) -> None:
        """A block in the pool differs from what it was when it filled: nothing from there on is kept."""
        done.damaged, done.behind = True, 0
        self._tier.figures.blocks_damaged += 1
        text = "event=tier1_damaged session=%s block=%d: it differs from what it was when it filled"
        _log.error(text, chain.story.session, ordinal)

    def _own(self, session: SessionId, generation: int) -> None:
        self._owners[session] = max(generation, self._owners.get(session, 0))
        if len(self._owners) > SESSIONS_MAX:
            self._owners.popitem(last=False)

    def _left(self, session: SessionId, generation: int) -> None:
        """Nobody that is followed has it any more; it may be taken up elsewhere."""
        chain = self._tier.index.get(session)
        if chain is not None and chain.generation <= generation:
            chain.live, chain.left_s = False, time.monotonic()


def _in_parts(due: _Due, slabs: list[Slab]) -> _Batch:
    """What is due of a session as far as there is room, in parts that are entered one after the other."""
    return [
        (
            replace(
                due, first=due.first + at, blocks=due.blocks[at:][:ENTER_BLOCKS], sums=due.sums[at:][:ENTER_BLOCKS]
            ),
            slabs[at : at + ENTER_BLOCKS],
        )
        for at in range(0, len(slabs), ENTER_BLOCKS)
    ]


def _tokens(covered: Covered, start: int, count: int) -> tuple[int, ...]:
    """The outputs at `count` positions from `start` on; those of the prompt are not known here."""
    prompt_len = covered.slot.prompt_len
    return tuple(covered.outputs[max(0, start - prompt_len) : max(0, start + count - prompt_len)])


def _kv(reader: ArenaReader, pool: Pool, slot: Slot) -> SessionKv:
    """Whose KV it is, for the chain's story."""
    prompt = (slot.prompt_len, slot.prompt_hash)
    return SessionKv(slot.session, key_of(reader), pool.form, prompt, (), 0, pool.rank_count)
