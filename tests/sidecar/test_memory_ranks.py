"""Tier 1 of an engine with several ranks: a block is kept of all of them, or of none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient
from support.memory_rig import PROMPT, MemoryBench, memory_of, outputs, session
from support.mover_rig import BLOCK_TOKENS, Processes, Worker
from support.rank_rig import RankedWorker


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[RankedWorker]:
    worker = RankedWorker(tmp_path, "old", holder)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[RankedWorker]:
    worker = RankedWorker(tmp_path, "new", holder, block_count=48, gap_bytes=100)
    yield worker
    worker.close()


@pytest.fixture
def bench(tmp_path: Path, holder: HolderClient, old: RankedWorker, new: RankedWorker) -> MemoryBench:
    bench = MemoryBench(tmp_path, holder, memory_of(4))
    bench.watch(old, new)
    return bench


async def test_blocks_of_all_ranks_come_back_after_their_pools_are_lost(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: RankedWorker, new: RankedWorker
) -> None:
    old.run(session(1), PROMPT, outputs(11), [4, 3, 2, 1])
    assert await bench.turn(old) == 4
    for view in old.views:
        view[:] = b"\xee" * old.size
    again = MemoryBench(tmp_path, holder, bench.memory)
    again.watch(new)
    slot = new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    result = await again.restore(new, 1)
    assert (result.ok, result.blocks_verified) == (True, 4), result
    assert slot.inbox() == (LoadState.DONE, 16)
    assert new.right([*PROMPT, *outputs(11)], range(16), [9, 8, 7, 6]) == list(range(16))


async def test_a_block_that_one_rank_has_not_finished_is_not_kept(bench: MemoryBench, old: RankedWorker) -> None:
    # Of the 12th position one rank has not done the step.
    old.run(session(1), PROMPT, outputs(7), [1, 2, 3, 4], behind={1})
    assert await bench.turn(old) == 2
    assert bench.kept(1) == 2 * BLOCK_TOKENS
    old.write([*PROMPT, *outputs(7)], range(12), [1, 2, 3, 4])
    assert old.ranks[1].commit(old.steps)
    assert await bench.turn(old) == 1
    assert bench.kept(1) == 3 * BLOCK_TOKENS


@pytest.mark.parametrize("rank", [0, 1])
async def test_damage_in_the_part_of_one_rank_is_found(
    bench: MemoryBench, old: RankedWorker, new: RankedWorker, rank: int
) -> None:
    old.run(session(1), PROMPT, outputs(11), [1, 2, 3, 4])
    await bench.turn(old)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    size = old.layout.block_bytes
    bench.memory[bench.area.offset(chain.full[3].slab) + rank * size + 33] ^= 2
    new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    result = await bench.restore(new, 1)
    assert (result.ok, result.reason, result.kept_tokens) == (False, "corrupt", 12)
    # And before it is kept at all.
    old.run(session(2), PROMPT, outputs(11), [11, 12, 13, 14])
    await bench.look(old)
    old.views[rank][old.layout.spans(13)[1][0]] ^= 1
    # The pool of the first one is as it was: what was corrupt is copied anew.
    assert await bench.saver.turn(old.arena) == 2 + 1
    assert (bench.kept(1), bench.kept(2)) == (16, 2 * BLOCK_TOKENS)


async def test_an_engine_with_another_number_of_ranks_gets_nothing(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: RankedWorker
) -> None:
    old.run(session(1), PROMPT, outputs(11), [1, 2, 3, 4])
    await bench.turn(old)
    single = Worker(tmp_path, "single", holder)
    single.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    result = await bench.restore(single, 1)
    assert (result.ok, result.reason) == (False, "ranks")
    assert not any(single.view[:])
    single.close()
