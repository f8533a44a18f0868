"""A worker of several ranks beside a real mover: KV of all arrives, or none, and never what one has not done."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.session.manifest import decode
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import RestoreResult
from support.mover_rig import BLOCK_TOKENS, Processes, Worker
from support.rank_rig import RankedWorker

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = list(range(100, 110))
BLOCKS, ROOM = [1, 2, 3, 4], [9, 8, 7, 6]
TOKENS = len(PROMPT) + len(OUTPUTS) - 1


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()
    assert "Traceback" not in started.log()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def mover(processes: Processes, holder: HolderClient, root: Path) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover("--poll-s", "0.005", "--store", str(root)))
    yield client
    await client.close()


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


async def restore(mover: MoverClient, old: Worker | None, new: Worker) -> RestoreResult:
    source = None if old is None else (old.arena, 1)
    return await mover.restore(SESSION, source=source, to_arena=new.arena, to_generation=2, deadline_s=5)


async def until(mover: MoverClient, name: str, value: int) -> dict[str, int]:
    for _ in range(500):
        status = await mover.status()
        if status[name] >= value:
            return status
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not become {value}: {status}")


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 10])
async def test_the_kv_of_all_ranks_arrives_whatever_the_cut(
    mover: MoverClient, old: RankedWorker, new: RankedWorker, count: int
) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, OUTPUTS[:count], BLOCKS)
    tokens = len(PROMPT) + count - 1
    await until(mover, "blocks_summed", tokens // BLOCK_TOKENS)
    slot = new.wait(SESSION, PROMPT, OUTPUTS[:count], ROOM)
    result = await restore(mover, old, new)
    assert result.ok, result
    assert (result.tokens, slot.inbox()) == (tokens, (LoadState.DONE, tokens))
    assert new.right([*PROMPT, *OUTPUTS[:count]], range(tokens), ROOM) == list(range(tokens))
    assert result.blocks_verified == tokens // BLOCK_TOKENS
    assert result.bytes == 2 * -(-tokens // BLOCK_TOKENS) * old.layout.block_bytes


@pytest.mark.parametrize("late", [0, 1])
async def test_a_rank_that_lags_one_step_is_found_and_its_step_is_not_restored(
    mover: MoverClient, old: RankedWorker, new: RankedWorker, late: int
) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS, behind={late})
    # What was journaled is not in all ranks, whoever asks for it.
    slot = new.wait(SESSION, PROMPT, OUTPUTS, ROOM)
    result = await restore(mover, old, new)
    assert (result.ok, result.reason, slot.inbox()) == (False, "ranks", (LoadState.FAILED, 0))
    assert "all ranks have done 9 of 10 outputs" in result.error
    assert (await mover.verify(old.arena, SESSION, 1)).tokens == TOKENS - 1
    assert (await mover.status())["failures_ranks"] == 1
    # What they have in common is there and right.
    again = new.wait(SESSION, PROMPT, OUTPUTS[:-1], [20, 21, 22, 23], generation=3)
    result = await mover.restore(SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=3, deadline_s=5)
    assert (result.ok, again.inbox()) == (True, (LoadState.DONE, TOKENS - 1))
    assert len(new.right([*PROMPT, *OUTPUTS], range(TOKENS - 1), [20, 21, 22, 23])) == TOKENS - 1


async def test_a_block_is_not_summed_before_all_ranks_have_filled_it(mover: MoverClient, old: RankedWorker) -> None:
    await mover.watch(old.arena, "old")
    # Twelve positions fill three blocks, and one rank has not done the step of the last.
    old.run(SESSION, PROMPT, OUTPUTS[:7], BLOCKS, behind={1})
    await until(mover, "blocks_summed", 2)
    await asyncio.sleep(0.3)
    assert (await mover.status())["blocks_summed"] == 2
    old.write([*PROMPT, *OUTPUTS[:7]], range(11, 12), BLOCKS)
    assert old.ranks[1].commit(7)
    await until(mover, "blocks_summed", 3)
    assert (await mover.verify(old.arena, SESSION, 1)).blocks_damaged == 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_block_that_changed_in_one_rank_is_copied_in_none(
    mover: MoverClient, old: RankedWorker, new: RankedWorker, rank: int
) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS)
    await until(mover, "blocks_summed", 3)
    old.views[rank][old.layout.spans(2)[3][0] + 5] ^= 1
    slot = new.wait(SESSION, PROMPT, OUTPUTS, ROOM)
    result = await restore(mover, old, new)
    assert (result.ok, result.reason, slot.inbox()) == (False, "checksum", (LoadState.FAILED, 0))
    assert "block 1 differs" in result.error
    for view in new.views:
        assert not any(view[start] for block in ROOM for start, _ in new.layout.spans(block))
    assert (await mover.verify(old.arena, SESSION, 1)).blocks_damaged == 1


async def test_from_disk_all_ranks_come_back_as_of_the_step_that_they_agreed_on(
    mover: MoverClient, old: RankedWorker, new: RankedWorker, root: Path
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS, behind={1})
    taken = await mover.snapshot(old.arena)
    assert (taken.stored, taken.kv_tokens) == (1, TOKENS - 1)
    found = await mover.stored(SESSION)
    assert (found.kv_len, found.outputs) == (TOKENS - 1, len(OUTPUTS) - 1)
    [stored] = [path for path in (root / "sessions" / SESSION).iterdir() if path.name.startswith("0")]
    manifest = decode(stored.read_bytes())
    assert (manifest.ranks, manifest.step, manifest.block_bytes) == (2, 9, 2 * old.layout.block_bytes)
    slot = new.wait(SESSION, PROMPT, OUTPUTS[: found.outputs], ROOM)
    result = await restore(mover, None, new)
    assert (result.ok, slot.inbox()) == (True, (LoadState.DONE, TOKENS - 1))
    assert len(new.right([*PROMPT, *OUTPUTS], range(TOKENS - 1), ROOM)) == TOKENS - 1


async def test_another_number_of_ranks_is_refused_in_memory_and_from_disk(
    mover: MoverClient, old: RankedWorker, tmp_path: Path, holder: HolderClient
) -> None:
    alone = Worker(tmp_path, "alone", holder)
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS)
    await mover.snapshot(old.arena)
    slot = alone.wait(SESSION, PROMPT, OUTPUTS, ROOM)
    for source in (old, None):
        result = await restore(mover, source, alone)
        assert (result.ok, result.reason) == (False, "ranks"), result
        assert "parts of 2 ranks, its new engine has 1" in result.error
    assert slot.inbox() == (LoadState.FAILED, 0)
    alone.close()


async def test_in_the_same_memory_a_session_moves_to_other_blocks_of_all_ranks(
    mover: MoverClient, old: RankedWorker, tmp_path: Path, holder: HolderClient
) -> None:
    heir = RankedWorker(tmp_path, "heir", holder, pool=old)
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS)
    heir.wait(SESSION, PROMPT, OUTPUTS, [1, 2, 13, 14])
    result = await restore(mover, old, heir)
    assert result.ok, result
    assert result.bytes == 2 * 2 * old.layout.block_bytes
    assert len(heir.right([*PROMPT, *OUTPUTS], range(TOKENS), [1, 2, 13, 14])) == TOKENS
    for commits in heir.ranks:
        commits.close()
    heir.writer.close()


async def test_where_one_rank_s_pool_is_gone_nothing_is_restored(
    mover: MoverClient, old: RankedWorker, new: RankedWorker, holder: HolderClient
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, BLOCKS)
    assert holder.drop("old/1/1")
    slot = new.wait(SESSION, PROMPT, OUTPUTS, ROOM)
    result = await restore(mover, old, new)
    assert (result.ok, result.reason, slot.inbox()) == (False, "pool", (LoadState.FAILED, 0))
