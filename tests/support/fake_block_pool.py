"""vLLM's BlockPool as far as midstream touches it, stricter than the original.

Blocks and free list behave as in vLLM 0.32 (v1/core/block_pool.py, kv_cache_utils.py): new blocks come from the front,
freed ones without a prefix-cache hash go back to the front, block 0 is the null block. What vLLM would only notice
later, as a broken list or an assertion in the engine, is an error at once here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """One block's metadata."""

    block_id: int
    ref_cnt: int = 0


class FreeQueue:
    """The free list."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.order = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.order)

    def popleft(self) -> Block:
        if not self.order:
            raise ValueError("No free blocks available")
        return self.order.pop(0)

    def remove(self, block: Block) -> None:
        if block not in self.order:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        self.order.remove(block)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt == 0, f"{block} is put into the free list while somebody has it"
            assert block not in self.order, f"{block} is in the free list already"
        assert len(set(map(id, blocks))) == len(blocks), "a block is put into the free list twice"
        self.order[:0] = blocks


class FakeBlockPool:
    """A pool of `count` blocks, of which block 0 is nobody's."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.free_block_queue.popleft()

    def get_new_blocks(self, count: int) -> list[Block]:
        if count > self.free_block_queue.num_free_blocks:
            raise ValueError(f"Cannot get {count} free blocks from the pool")
        taken = [self.free_block_queue.popleft() for _ in range(count)]
        for block in taken:
            assert block.ref_cnt == 0, f"the engine dies: {block} is in the free list"
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        freed = []
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"{block} is freed once too often"
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.prepend_n(freed)
