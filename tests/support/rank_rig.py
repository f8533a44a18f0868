"""A worker of two ranks beside a real mover: each has a pool, KV of every position, and commits of its own."""

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from midstream.session.arena_writer import SlotWriter
from midstream.session.commit_writer import CommitWriter
from midstream.session.held import HolderClient, create_host_pool, map_pool
from midstream.session.ids import SessionId
from midstream.session.layout import PoolMeta
from support.mover_rig import BLOCK_TOKENS, KEY, PLANES, TOKEN_BYTES, Worker, kv, prompt_hash

RANKS = 2


class RankedWorker(Worker):
    """One worker epoch with RANKS pools."""

    def __init__(
        self,
        folder: Path,
        name: str,
        holder: HolderClient,
        *,
        block_count: int = 64,
        gap_bytes: int = 0,
        pool: "RankedWorker | None" = None,
    ) -> None:
        super().__init__(folder, name, holder, block_count=block_count, gap_bytes=gap_bytes, pool=pool)
        self.names = pool.names if pool else [self.pool_name, f"{name}/1/1"]
        self.second = pool.second if pool else create_host_pool(self.size)
        self.views = [self.view, map_pool(self.second, self.size)]
        if not pool:
            meta = PoolMeta(self.size, self.layout, self.meta.fingerprint, {"pid": os.getpid(), "fd": self.second})
            holder.put(self.names[1], self.second, meta.to_json())
        self.writer.publish({"key": KEY, "pools": self.names})
        self.ranks = [CommitWriter(self.arena, rank) for rank in range(RANKS)]
        self.steps = 0

    def step(self, slot: SlotWriter, token: int, *, behind: Collection[int] = ()) -> None:
        """Journal the token of a step, which some ranks have not done."""
        self.steps += 1
        for rank, commits in enumerate(self.ranks):
            if rank not in behind:
                assert commits.commit(self.steps)
        slot.append_tokens([token])
        slot.mark(self.steps)

    def write(
        self, tokens: Sequence[int], positions: range, blocks: Sequence[int], *, behind: Collection[int] = ()
    ) -> None:
        """Compute the KV of positions into their blocks, in the ranks that are not behind."""
        for rank in set(range(RANKS)) - set(behind):
            for position, plane, at in self._places(positions, blocks):
                self.views[rank][at : at + TOKEN_BYTES] = kv(tokens, position, rank * PLANES + plane)

    def right(self, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> list[int]:
        """Which of the positions hold exactly the KV of these tokens, in all ranks."""
        wrong = {
            position
            for rank in range(RANKS)
            for position, plane, at in self._places(positions, blocks)
            if self.views[rank][at : at + TOKEN_BYTES] != kv(tokens, position, rank * PLANES + plane)
        }
        return [position for position in positions if position not in wrong]

    def run(
        self,
        session: SessionId,
        prompt: Sequence[int],
        outputs: Sequence[int],
        blocks: Sequence[int],
        generation: int = 1,
        *,
        behind: Collection[int] = (),
    ) -> SlotWriter:
        """A session that has decoded so far; ranks that are `behind` have not done the step of the newest output."""
        slot = self.writer.admit(session, generation, len(prompt), prompt_hash(prompt))
        assert slot is not None
        slot.set_blocks(blocks)
        tokens = [*prompt, *outputs]
        for count, token in enumerate(outputs, 1):
            late = behind if count == len(outputs) else ()
            done = len(prompt) + count - 1
            first = 0 if count == 1 else done - 1
            self.write(tokens, range(first, done), blocks, behind=late)
            self.step(slot, token, behind=late)
        return slot

    def close(self) -> None:
        """Unmap; the arena file and the held pools stay."""
        for commits in self.ranks:
            commits.close()
        super().close()
        self.views[1].close()
        with contextlib.suppress(OSError):
            os.close(self.second)

    def _places(self, positions: range, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Position, plane and offset in a rank's pool."""
        found = []
        for position in positions:
            spans = self.layout.spans(blocks[position // BLOCK_TOKENS])
            found += [
                (position, n, start + position % BLOCK_TOKENS * TOKEN_BYTES) for n, (start, _) in enumerate(spans)
            ]
        return found
