"""Tier 1 over host pools: what is kept of whom, and that nothing comes back which is not exactly what was there."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, LoadState, Slot
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient
from midstream.sidecar.mover import memory_saver, restorer
from midstream.sidecar.mover.host_pool import HostPool
from midstream.sidecar.mover.memory_index import Chain, Kept
from midstream.sidecar.mover.orders import Order
from midstream.sidecar.mover.pools import HostBlocks, Pool, SumKind
from midstream.sidecar.mover.protocol import Reason
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.suspects import Suspect
from support.memory_rig import PROMPT, RECORD_BYTES, SLABS_PER_EXTENT, MemoryBench, memory_of, outputs, run, session
from support.mover_rig import BLOCK_TOKENS, Processes, Worker, prompt_hash


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "old", holder, block_count=256)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "new", holder, block_count=128, gap_bytes=100)
    yield worker
    worker.close()


@pytest.fixture
def bench(tmp_path: Path, holder: HolderClient, old: Worker, new: Worker) -> MemoryBench:
    bench = MemoryBench(tmp_path, holder, memory_of(4))
    bench.watch(old, new)
    return bench


def scribble(worker: Worker) -> None:
    """Nothing of a pool is what it was."""
    worker.view[:] = b"\xee" * worker.size


@pytest.mark.parametrize("count", [3, 6, 7, 8, 11])
async def test_full_blocks_come_back_after_the_pool_is_lost(
    bench: MemoryBench, old: Worker, new: Worker, count: int
) -> None:
    run(old, 1, count, [20, 19, 18, 17, 16, 15])
    full = (len(PROMPT) + count - 1) // BLOCK_TOKENS
    assert await bench.turn(old) == full
    scribble(old)
    kept = await bench.tier.kept(session(1))
    assert (kept.found, kept.kv_len, kept.prompt_len) == (True, full * BLOCK_TOKENS, len(PROMPT))
    room = [7, 3, 40, 9, 1, 30]
    slot = new.wait(session(1), PROMPT, outputs(kept.outputs), room)
    result = await bench.restore(new, 1)
    assert result.ok, result
    assert slot.inbox() == (LoadState.DONE, kept.kv_len)
    tokens = [*PROMPT, *outputs(count)]
    assert new.right(tokens, range(kept.kv_len), room) == list(range(kept.kv_len))
    assert (result.blocks_verified, result.blocks_unverified) == (full, 0)


async def test_a_block_is_copied_once(bench: MemoryBench, old: Worker) -> None:
    slot = run(old, 1, 7, [1, 2, 3])
    assert await bench.turn(old) == 3
    assert await bench.turn(old) == 0
    blocks, said = [1, 2, 3, 4, 5], outputs(7)
    slot.append_blocks([4, 5])
    for token in outputs(5, 200):
        old.decode(slot, PROMPT, said, blocks, token)
    assert await bench.turn(old) == 1
    assert bench.tier.figures.blocks_saved == 4
    assert bench.tier.index.get(session(1)).outputs == [*outputs(7), *outputs(3, 200)]  # type: ignore[union-attr]


async def test_less_than_a_prompt_is_no_offer(bench: MemoryBench, old: Worker) -> None:
    run(old, 1, 1, [1, 2])
    assert await bench.turn(old) == 1
    assert not (await bench.tier.kept(session(1))).found


async def test_any_shorter_cut_is_served(bench: MemoryBench, old: Worker, new: Worker) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await bench.turn(old)
    for generation, count in enumerate(range(1, 12), 2):
        slot = new.wait(session(1), PROMPT, outputs(count), [9, 8, 7, 6], generation)
        assert (await bench.restore(new, 1, generation)).ok
        slot.finish("abort")
        tokens = len(PROMPT) + count - 1
        assert len(new.right([*PROMPT, *outputs(count)], range(tokens), [9, 8, 7, 6])) == tokens
        scribble(new)


async def test_other_tokens_prompts_and_keys_are_refused(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 7, [1, 2, 3])
    await bench.turn(old)
    alien = Worker(tmp_path, "alien", holder, key={"engine": "rig", "model": "other"})
    for worker, prompt, said, reason in (
        (new, PROMPT, [100, 999, 102], "tokens"),
        (new, [5, 6, 7, 8, 9, 11], outputs(3), "prompt"),
        (new, PROMPT, outputs(9), "incomplete"),
        (alien, PROMPT, outputs(3), "key"),
    ):
        slot = worker.wait(session(1), prompt, said, [4, 5, 6, 7])
        result = await bench.restore(worker, 1)
        assert (result.ok, result.reason) == (False, reason)
        assert slot.inbox() == (LoadState.FAILED, 0)
        slot.finish("abort")
        assert not any(worker.view[:])
    alien.close()


async def test_a_block_that_differs_from_its_sum_is_never_kept_nor_any_after_it(
    bench: MemoryBench, old: Worker
) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await bench.look(old)
    old.view[old.layout.spans(3)[2][0]] ^= 1
    assert await bench.saver.turn(old.arena) == 2
    assert bench.kept(1) == 2 * BLOCK_TOKENS
    assert (bench.tier.figures.blocks_damaged, bench.tier.figures.blocks_dropped) == (1, 2)
    assert bench.area.slabs_used == 2
    # It is not tried again and again.
    assert await bench.turn(old) == 0
    assert bench.tier.figures.blocks_damaged == 1


class Interfered(HostPool):
    """A host pool; `meanwhile` happens while blocks are copied out of it."""

    def save(self, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        found = super().save(blocks, to)
        Interfered.meanwhile()
        return found

    @staticmethod
    def meanwhile() -> None:
        return


class InterferedSources(Sources):
    """Pools that are interfered with."""

    def mapped(self, path: Path) -> Pool | None:
        found = super().mapped(path)
        if not isinstance(found, HostPool):
            return found
        return Interfered(found.name, found.layout, found.fingerprint, found.view, found.identity)


@pytest.mark.parametrize("happening", ["table", "end", "fault"])
async def test_what_was_copied_while_the_blocks_changed_hands_is_dropped(
    tmp_path: Path, holder: HolderClient, old: Worker, monkeypatch: pytest.MonkeyPatch, happening: str
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(2), sources=InterferedSources)
    bench.watch(old)
    slot = run(old, 1, 7, [1, 2, 3])
    await bench.look(old)
    identity = old.arena.stat()

    def meanwhile() -> None:
        match happening:
            case "table":
                slot.set_blocks([11, 12, 13])
            case "end":
                slot.finish("stop")
            case "fault":
                bench.suspects.add([Suspect(old.arena, (identity.st_dev, identity.st_ino), "GPU-0")])

    monkeypatch.setattr(Interfered, "meanwhile", staticmethod(meanwhile))
    if happening == "fault":
        with pytest.raises(Exception, match="fault") as caught:
            await bench.saver.turn(old.arena)
        assert caught.value.reason is Reason.FAULT  # type: ignore[attr-defined]
    else:
        assert await bench.saver.turn(old.arena) == 0
    assert (bench.kept(1), bench.area.slabs_used) == (0, 0)
    assert bench.tier.figures.blocks_dropped == 3


async def going(bench: MemoryBench, full: int) -> None:
    """Let the saver run by itself until so many blocks are kept."""
    running = asyncio.create_task(bench.saver.run())
    for _ in range(4000):
        if bench.tier.figures.blocks_saved >= full:
            break
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_two_calls_are_under_way_and_enter_what_they_bring_in_order(
    bench: MemoryBench, old: Worker, new: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 75, range(20))
    run(old, 2, 75, range(30, 50))
    await bench.look(old)
    monkeypatch.setattr(memory_saver, "BATCH_BYTES", 6 << 10)
    save, second, calls, under_way, most = HostPool.save, threading.Event(), list[int](), 0, 0

    def turned(self: HostPool, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        nonlocal under_way, most
        calls.append(len(blocks))
        under_way += 1
        most = max(most, under_way)
        found = save(self, blocks, to)
        if len(calls) == 1:
            # The first one comes back last.
            assert second.wait(20)
        second.set()
        under_way -= 1
        return found

    monkeypatch.setattr(HostPool, "save", turned)
    await going(bench, 40)
    assert (calls, most) == ([6, 6, 6, 6, 6, 6, 4], 2)
    assert (bench.tier.figures.blocks_dropped, bench.area.slabs_used) == (0, 40)
    assert bench.saver.behind()["tier1_behind_blocks"] == 0
    scribble(old)
    for number in (1, 2):
        new.wait(session(number), PROMPT, outputs(75), range(30 * number, 30 * number + 20))
        assert (await bench.restore(new, number)).ok
        tokens, room = [*PROMPT, *outputs(75)], range(30 * number, 30 * number + 20)
        assert len(new.right(tokens, range(80), room)) == 80


async def test_what_comes_after_a_call_that_was_dropped_is_dropped_and_sent_again(
    bench: MemoryBench, old: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 75, range(20))
    await bench.look(old)
    monkeypatch.setattr(memory_saver, "BATCH_BYTES", 6 << 10)
    save, second, calls = HostPool.save, threading.Event(), list[int]()

    def refused(self: HostPool, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        calls.append(blocks[0])
        if len(calls) == 1:
            assert second.wait(20)
            raise PoolError("the link is down; look at it")
        second.set()
        return save(self, blocks, to)

    monkeypatch.setattr(HostPool, "save", refused)
    await going(bench, 20)
    assert calls[:2] == [0, 6]
    assert sorted(set(calls)) == [0, 6, 12, 18]
    assert (bench.kept(1), bench.area.slabs_used) == (80, 20)
    # Each slab of what was dropped is free again, and was counted.
    assert bench.tier.figures.blocks_dropped >= 12
    assert bench.saver.behind()["tier1_behind_blocks"] == 0


async def test_of_what_is_entered_in_part_a_chain_keeps_its_slabs_and_the_rest_are_free(
    bench: MemoryBench, old: Worker, new: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await bench.look(old)
    keep = bench.tier.keep

    def failing(chain: Chain, ordinal: int, kept: Kept) -> None:
        if ordinal == 2:
            raise RuntimeError("no more")
        keep(chain, ordinal, kept)

    monkeypatch.setattr(bench.tier, "keep", failing)
    with pytest.raises(RuntimeError, match="no more"):
        await bench.saver.turn(old.arena)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    assert (bench.kept(1), bench.area.slabs_used, bench.tier.figures.blocks_dropped) == (8, 2, 2)
    taken = bench.area.take(chain.story.form, 4)
    assert not {kept.slab for kept in chain.full} & set(taken)
    bench.area.give(taken)
    # After a pause the rest is kept behind them.
    monkeypatch.setattr(bench.tier, "keep", keep)
    await asyncio.sleep(memory_saver.AGAIN_S)
    assert await bench.saver.turn(old.arena) == 2
    scribble(old)
    new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    assert (await bench.restore(new, 1)).ok
    assert len(new.right([*PROMPT, *outputs(11)], range(16), [9, 8, 7, 6])) == 16


async def test_what_cannot_be_copied_is_not_tried_without_a_pause(
    bench: MemoryBench, old: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 75, range(20))
    await bench.look(old)
    calls: list[int] = []

    def refused(self: HostPool, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        calls.append(len(blocks))
        raise PoolError("the link is down; look at it")

    monkeypatch.setattr(HostPool, "save", refused)
    running = asyncio.create_task(bench.saver.run())
    await asyncio.sleep(0.4)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert 1 <= len(calls) <= 3
    assert (bench.area.slabs_used, bench.kept(1)) == (0, 0)


async def test_nothing_is_copied_or_entered_while_a_session_waits_for_its_kv(bench: MemoryBench, old: Worker) -> None:
    run(old, 1, 75, range(20))
    await bench.look(old)
    bench.way.enter()
    running = asyncio.create_task(bench.saver.run())
    await asyncio.sleep(0.03)
    assert (bench.area.slabs_used, bench.kept(1)) == (0, 0)
    bench.way.leave()
    for _ in range(4000):
        if bench.kept(1) == 80:
            break
        await asyncio.sleep(0.005)
    assert bench.kept(1) == 80
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_saver_that_ends_leaves_no_slab_behind_and_no_thread_in_the_memory(
    bench: MemoryBench, old: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 75, range(20))
    await bench.look(old)
    monkeypatch.setattr(memory_saver, "BATCH_BYTES", 6 << 10)
    save, begun, go_on, over = HostPool.save, threading.Semaphore(0), threading.Event(), list[int]()

    def held(self: HostPool, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        begun.release()
        assert go_on.wait(20)
        found = save(self, blocks, to)
        over.append(len(found))
        return found

    monkeypatch.setattr(HostPool, "save", held)
    running = asyncio.create_task(bench.saver.run())
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=20)
    running.cancel()
    await asyncio.sleep(0.05)
    assert not running.done()
    go_on.set()
    await asyncio.gather(running, return_exceptions=True)
    assert over == [6, 6]
    assert (bench.kept(1), bench.area.slabs_used, bench.tier.figures.blocks_dropped) == (0, 0, 12)


@pytest.mark.parametrize("every", [1, 3])
async def test_tails_are_kept_as_the_policy_asks(
    tmp_path: Path, holder: HolderClient, old: Worker, new: Worker, every: int
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(2), tail_tokens=every)
    bench.watch(old, new)
    blocks, said = [1, 2, 3, 4], outputs(2)
    slot = run(old, 1, 2, blocks)
    await bench.turn(old)
    kept = []
    for token in outputs(8, 200):
        old.decode(slot, PROMPT, said, blocks, token)
        await bench.turn(old)
        kept.append(bench.kept(1))
    assert kept == ([8, 9, 10, 11, 12, 13, 14, 15] if every == 1 else [8, 8, 8, 11, 12, 12, 12, 15])
    assert bench.area.slabs_used == 4
    scribble(old)
    count = 15 - len(PROMPT) + 1
    new.wait(session(1), PROMPT, said[:count], [9, 8, 7, 6])
    result = await bench.restore(new, 1)
    assert (result.ok, result.tokens, result.blocks_verified) == (True, 15, 4)
    assert len(new.right([*PROMPT, *said], range(15), [9, 8, 7, 6])) == 15


async def test_a_slab_that_was_damaged_is_found_and_what_is_before_it_still_serves(
    bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 15, [1, 2, 3, 4, 5])
    await bench.turn(old)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    bench.memory[bench.area.offset(chain.full[3].slab) + 700] ^= 4
    slot = new.wait(session(1), PROMPT, outputs(12), [9, 8, 7, 6, 5])
    result = await bench.restore(new, 1)
    assert (result.ok, result.reason, result.kept_tokens) == (False, "corrupt", 3 * BLOCK_TOKENS)
    assert (bench.kept(1), bench.tier.figures.blocks_corrupt) == (3 * BLOCK_TOKENS, 1)
    # There is something left to go on from: the engine is told later, if it still waits then.
    assert slot.inbox() == (LoadState.NONE, 0)
    again = new.wait(session(1), PROMPT, outputs(7), [19, 18, 17], 3)
    assert (await bench.restore(new, 1, 3)).ok
    assert again.inbox() == (LoadState.DONE, 12)
    await asyncio.sleep(0.3)
    assert slot.inbox() == (LoadState.FAILED, 0)


async def test_what_was_to_be_told_later_is_told_to_nobody_else(bench: MemoryBench, old: Worker, new: Worker) -> None:
    run(old, 1, 15, [1, 2, 3, 4, 5])
    await bench.turn(old)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    bench.memory[bench.area.offset(chain.full[3].slab)] ^= 4
    slot = new.wait(session(1), PROMPT, outputs(12), [9, 8, 7, 6, 5])
    assert not (await bench.restore(new, 1)).ok
    slot.finish("abort")
    # Its place in the arena is another session's, which waits there, too.
    other = None
    for number in range(2, 40):
        other = new.writer.admit(session(number), 1, len(PROMPT), prompt_hash(PROMPT), outputs(3))
        if other is None or other.index == slot.index:
            break
    assert other is not None
    assert other.index == slot.index
    other.set_blocks([20, 21, 22])
    other.report(LoadState.WAITING, 0, 0)
    reader = ArenaReader(new.arena)
    [waiting] = [found for found in reader.slots() if found.session == session(number)]
    reader.answer(waiting, LoadState.DONE, 8)
    await asyncio.sleep(0.3)
    assert other.inbox() == (LoadState.DONE, 8)
    reader.close()


async def test_an_engine_that_was_to_be_told_later_is_told_when_the_mover_ends(
    bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 15, [1, 2, 3, 4, 5])
    await bench.turn(old)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    bench.memory[bench.area.offset(chain.full[3].slab)] ^= 4
    slot = new.wait(session(1), PROMPT, outputs(12), [9, 8, 7, 6, 5])
    assert not (await bench.restore(new, 1)).ok
    bench.restorer.close()
    assert slot.inbox() == (LoadState.FAILED, 0)


@pytest.mark.parametrize("ends", [True, False])
async def test_an_engine_that_cannot_be_told_keeps_no_other_from_being_told(
    bench: MemoryBench, old: Worker, new: Worker, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    answer = ArenaReader.answer

    def failing(self: ArenaReader, slot: Slot, load: LoadState, tokens: int) -> None:
        if slot.session == session(1):
            raise ValueError("mmap closed or invalid")
        answer(self, slot, load, tokens)

    monkeypatch.setattr(ArenaReader, "answer", failing)
    monkeypatch.setattr(restorer, "ANSWER_LATER_S", 60.0 if ends else 0.1)
    slots = []
    for number in (1, 2, 3):
        run(old, number, 15, range(10 * number, 10 * number + 5))
        await bench.turn(old)
        chain = bench.tier.index.get(session(number))
        assert chain is not None
        bench.memory[bench.area.offset(chain.full[3].slab)] ^= 4
        slots.append(new.wait(session(number), PROMPT, outputs(12), range(10 * number, 10 * number + 5)))
        assert not (await bench.restore(new, number)).ok
    if ends:
        bench.restorer.close()
    for _ in range(4000):
        if slots[2].inbox() != (LoadState.NONE, 0):
            break
        await asyncio.sleep(0.005)
    assert [slot.inbox() for slot in slots] == [(LoadState.NONE, 0), *[(LoadState.FAILED, 0)] * 2]
    assert bench.counters.failures[Reason.INTERNAL] == 1


async def test_another_mover_goes_on_with_what_is_there(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    run(old, 2, 7, [11, 12, 13])
    await bench.turn(old)
    again = MemoryBench(tmp_path, holder, bench.memory)
    again.watch(old, new)
    assert (again.kept(1), again.kept(2), again.area.torn) == (16, 12, 0)
    # What is kept already is not copied again, and what is new continues it.
    slot = old.writer.admit(session(3), 1, 1, "0" * 32)
    assert slot is not None
    assert await again.turn(old) == 0
    scribble(old)
    new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    assert (await again.restore(new, 1)).ok
    assert len(new.right([*PROMPT, *outputs(11)], range(16), [9, 8, 7, 6])) == 16


async def test_what_fell_over_in_the_pool_while_the_mover_was_away_is_not_taken_for_what_was_there(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker, new: Worker
) -> None:
    slot = run(old, 1, 11, [1, 2, 3, 4, 5])
    await bench.turn(old)
    old.view[old.layout.spans(2)[1][0]] ^= 1
    again = MemoryBench(tmp_path, holder, bench.memory)
    again.watch(old, new)
    said = outputs(11)
    for token in outputs(4, 200):
        old.decode(slot, PROMPT, said, [1, 2, 3, 4, 5], token)
    # Of what is kept the sums are known; the new block is summed, and kept behind them.
    assert await again.turn(old) == 1
    assert again.counters.blocks_summed == 1
    waits = new.wait(session(1), PROMPT, said[:11], [9, 8, 7, 6])
    order = Order(session(1), session(1), (old.arena, 1), new.arena, 2, 5.0)
    result = await again.restorer.restore(order)
    assert (result.ok, result.reason, result.kept_tokens) == (False, "checksum", 20)
    waits.finish("abort")
    new.wait(session(1), PROMPT, said[:11], [9, 8, 7, 6], 3)
    assert (await again.restore(new, 1, 3)).ok
    assert len(new.right([*PROMPT, *said], range(16), [9, 8, 7, 6])) == 16


async def test_a_session_that_another_engine_has_now_is_known_by_its_new_owner_after_a_restart(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 7, [1, 2, 3])
    await bench.turn(old)
    run(new, 1, 7, [5, 6, 7], generation=2)
    assert await bench.turn(new) == 0
    again = MemoryBench(tmp_path, holder, bench.memory)
    again.watch(new)
    await again.turn(new)
    assert again.counters.blocks_summed == 0
    assert list(again.sums.get((new.arena, session(1), 2), 1, SumKind.XXH3)) == new_sums(new, [5, 6, 7])


def new_sums(worker: Worker, blocks: Sequence[int]) -> list[int]:
    """What the blocks of a worker are."""
    pool = HostPool("new", worker.layout, "", memoryview(worker.view), 0)
    try:
        return pool.sum_blocks(blocks)
    finally:
        pool.view.release()


async def test_a_block_that_has_another_sum_under_the_same_owner_is_damaged_and_what_is_kept_stays(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await bench.turn(old)
    old.view[old.layout.spans(2)[1][0]] ^= 1
    again = MemoryBench(tmp_path, holder, bench.memory)
    again.watch(old)
    # As if it were summed before the index was read.
    monkeypatch.setattr(again.tier, "known_sums", lambda *_: {})
    assert await again.turn(old) == 0
    assert (again.kept(1), again.tier.figures.blocks_damaged) == (16, 1)


async def test_a_torn_record_ends_its_chain_and_its_slab_is_free(
    tmp_path: Path, holder: HolderClient, bench: MemoryBench, old: Worker
) -> None:
    run(old, 1, 15, [1, 2, 3, 4, 5])
    await bench.turn(old)
    chain = bench.tier.index.get(session(1))
    assert chain is not None
    # Records lie behind the extent's header, in the order of the slabs.
    at = 4096 + 64 + chain.full[2].slab.index * RECORD_BYTES + 50
    bench.memory[at] ^= 1
    again = MemoryBench(tmp_path, holder, bench.memory)
    assert (again.kept(1), again.area.torn, again.area.slabs_used) == (2 * BLOCK_TOKENS, 1, 2)


async def test_sessions_that_end_give_their_slabs_back_at_once(bench: MemoryBench, old: Worker) -> None:
    one, two, three = (run(old, n, 7, range(10 * n, 10 * n + 3)) for n in (1, 2, 3))
    assert await bench.turn(old) == 9
    one.finish("stop")
    # Another engine may take this one up.
    two.finish("abort")
    await bench.look(old)
    assert (bench.kept(1), bench.kept(2), bench.kept(3)) == (0, 12, 12)
    bench.saver.finish(session(2), 1)
    bench.saver.finish(session(3), 1)
    assert bench.area.slabs_used == 0
    # It is live in its arena still, and over all the same.
    three.append_blocks([90])
    assert await bench.turn(old) == 0


async def test_the_end_of_an_older_generation_takes_nothing_from_a_newer_one(
    bench: MemoryBench, old: Worker, new: Worker
) -> None:
    slot = run(old, 1, 7, [1, 2, 3])
    await bench.turn(old)
    run(new, 1, 7, [5, 6, 7], generation=2)
    # The same bytes under a newer owner are not copied again.
    assert await bench.turn(new) == 0
    assert bench.tier.figures.blocks_saved == 3
    slot.finish("stop")
    await bench.look(old)
    bench.saver.finish(session(1), 1)
    assert bench.kept(1) == 12
    bench.saver.finish(session(1), 2)
    assert bench.kept(1) == 0


async def test_kv_that_was_computed_anew_takes_the_place_of_what_was_kept(
    bench: MemoryBench, old: Worker, new: Worker
) -> None:
    run(old, 1, 7, [1, 2, 3])
    await bench.turn(old)
    run(new, 1, 11, [5, 6, 7, 8], generation=2)
    # As by another kernel: the second block has other bits.
    new.view[new.layout.spans(6)[0][0]] ^= 1
    assert await bench.turn(new) == 3
    scribble(old)
    slot = old.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6], 3)
    assert (await bench.restore(old, 1, 3)).ok
    assert slot.inbox() == (LoadState.DONE, 16)
    place = old.layout.spans(8)[0][0], new.layout.spans(6)[0][0]
    assert old.view[place[0]] == new.view[place[1]]


async def test_kv_that_was_computed_anew_after_a_preemption_takes_the_place_of_what_was_kept(
    bench: MemoryBench, old: Worker, new: Worker
) -> None:
    slot = run(old, 1, 7, [1, 2, 3])
    assert await bench.turn(old) == 3
    said = outputs(7)
    slot.set_blocks([11, 12, 13, 14])
    old.write([*PROMPT, *said], range(12), [11, 12, 13, 14])
    # As by another kernel: the second block has other bits. No block more has filled than was kept before.
    old.view[old.layout.spans(12)[0][0]] ^= 1
    old.decode(slot, PROMPT, said, [11, 12, 13, 14], 500)
    assert await bench.turn(old) == 2
    waits = new.wait(session(1), PROMPT, outputs(7), [9, 8, 7, 6])
    assert (await bench.restore(new, 1)).ok
    assert waits.inbox() == (LoadState.DONE, 12)
    assert new.view[new.layout.spans(8)[0][0]] == old.view[old.layout.spans(12)[0][0]]


async def test_what_an_owner_before_wrote_beyond_the_cut_is_dropped_when_the_session_goes_on_otherwise(
    tmp_path: Path, holder: HolderClient, old: Worker, new: Worker
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(2), tail_tokens=1)
    bench.watch(old, new)
    run(old, 1, 12, [1, 2, 3, 4, 5])
    await bench.turn(old)
    assert bench.kept(1) == 17
    # As many outputs were re-entered as have KV in two blocks; then other tokens came.
    said = outputs(3)
    slot = new.writer.admit(session(1), 2, len(PROMPT), prompt_hash(PROMPT), said)
    assert slot is not None
    slot.set_blocks([5, 6, 7, 8])
    new.write([*PROMPT, *said], range(8), [5, 6, 7, 8])
    slot.report(LoadState.DONE, 8, 0)
    await bench.turn(new)
    assert bench.kept(1) == 17
    new.decode(slot, PROMPT, said, [5, 6, 7, 8], 999)
    new.decode(slot, PROMPT, said, [5, 6, 7, 8], 998)
    await bench.turn(new)
    # The newest output has no KV yet: it is the one before that differs.
    assert bench.kept(1) == 10
    assert bench.tier.index.get(session(1)).outputs == [100, 101, 102, 999]  # type: ignore[union-attr]


async def test_a_branch_takes_the_kv_of_its_parent(bench: MemoryBench, old: Worker, new: Worker) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await bench.turn(old)
    new.wait(session(2), PROMPT, outputs(5), [9, 8, 7])
    assert (await bench.restore(new, 2, origin=session(1))).ok
    assert len(new.right([*PROMPT, *outputs(5)], range(10), [9, 8, 7])) == 10


async def test_it_takes_no_more_than_its_share_and_counts_what_waits(
    tmp_path: Path, holder: HolderClient, old: Worker
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(4), bytes_per_s=40 << 10)
    bench.watch(old)
    run(old, 1, 4 * 100, range(102))
    await bench.look(old)
    began = asyncio.get_running_loop().time()
    assert await bench.saver.turn(old.arena) == 40
    assert 0.9 < asyncio.get_running_loop().time() - began < 5
    behind = bench.saver.behind()
    assert (behind["tier1_behind_blocks"], behind["tier1_behind_bytes"]) == (61, 61 << 10)
    assert 0 < behind["tier1_behind_s"] < 10
    await bench.saver.turn(old.arena)
    await bench.saver.turn(old.arena)
    assert bench.saver.behind() == {"tier1_behind_blocks": 0, "tier1_behind_bytes": 0, "tier1_behind_s": 0.0}


async def test_when_it_is_full_the_newest_and_costliest_win(tmp_path: Path, holder: HolderClient, old: Worker) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(1))
    bench.watch(old)
    # Of 56 slabs 9 + 20 + 20 are taken.
    for number, first, count in ((1, 0, 31), (2, 20, 75), (3, 50, 75)):
        run(old, number, count, range(first, first + 20))
        await bench.turn(old)
    assert [bench.kept(n) // BLOCK_TOKENS for n in (1, 2, 3)] == [9, 20, 20]
    # One that is as costly and newer: first the cheap one goes, then the older one.
    run(old, 4, 75, range(80, 100))
    assert await bench.turn(old) == 20
    assert [bench.kept(n) // BLOCK_TOKENS for n in (1, 2, 3, 4)] == [0, 0, 20, 20]
    assert bench.tier.figures.sessions_evicted == 2
    # What had to go does not push out who pushed it out, and 16 slabs are enough for the cheap one alone.
    assert await bench.turn(old) == 9
    assert [bench.kept(n) // BLOCK_TOKENS for n in (1, 2, 3, 4)] == [9, 0, 20, 20]
    await asyncio.sleep(0.3)
    assert await bench.turn(old) == 0
    assert bench.saver.behind()["tier1_behind_blocks"] == 20
    assert bench.area.slabs_used <= SLABS_PER_EXTENT


async def test_one_too_large_for_what_is_left_keeps_what_it_has(
    tmp_path: Path, holder: HolderClient, old: Worker
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(1))
    bench.watch(old)
    slot = run(old, 1, 4 * 50, range(52))
    assert await bench.turn(old) == 51
    said, blocks = outputs(200), [*range(52), *range(60, 80)]
    slot.append_blocks(list(range(60, 80)))
    for token in outputs(40, 400):
        old.decode(slot, PROMPT, said, blocks, token)
    assert await bench.turn(old) == 5
    assert bench.kept(1) == SLABS_PER_EXTENT * BLOCK_TOKENS
    assert bench.saver.behind()["tier1_behind_blocks"] == 61 - 56
    # A newcomer of little cost gets nothing of it.
    run(old, 2, 7, [100, 101, 102])
    assert await bench.turn(old) == 0


async def test_what_is_being_read_is_given_to_nobody(
    tmp_path: Path, holder: HolderClient, old: Worker, new: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(1))
    bench.watch(old, new)
    run(old, 1, 31, range(10))
    await bench.turn(old)
    reading, go_on = threading.Event(), threading.Event()
    load = HostPool.load

    def held(self: HostPool, source: HostBlocks, blocks: Sequence[int], started: object) -> list[int]:
        reading.set()
        assert go_on.wait(20)
        return load(self, source, blocks, lambda: None)

    monkeypatch.setattr(HostPool, "load", held)
    new.wait(session(1), PROMPT, outputs(31), range(20, 30))
    restoring = asyncio.create_task(bench.restore(new, 1))
    assert await asyncio.to_thread(reading.wait, 20)
    # A better one comes, takes its place in the index, and gets only what nobody reads.
    run(old, 2, 4 * 50, range(20, 72))
    await bench.turn(old)
    assert (bench.kept(1), bench.kept(2) // BLOCK_TOKENS) == (0, SLABS_PER_EXTENT - 9)
    go_on.set()
    assert (await restoring).ok
    await asyncio.sleep(0.3)
    assert len(new.right([*PROMPT, *outputs(31)], range(36), range(20, 30))) == 36
    await bench.turn(old)
    assert bench.kept(2) // BLOCK_TOKENS == 51


async def test_an_area_that_is_too_small_for_a_block_is_said_once(
    tmp_path: Path, holder: HolderClient, old: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    bench = MemoryBench(tmp_path, holder, bytearray(4096))
    bench.watch(old)
    run(old, 1, 7, [1, 2, 3])
    assert [await bench.turn(old) for _ in range(3)] == [0, 0, 0]
    assert len([r for r in caplog.records if "tier1_too_small" in r.getMessage()]) == 1


async def test_an_extent_without_blocks_becomes_another_forms(
    tmp_path: Path, holder: HolderClient, old: Worker
) -> None:
    bench = MemoryBench(tmp_path, holder, memory_of(1))
    bench.watch(old)
    slot = run(old, 1, 7, [1, 2, 3])
    await bench.turn(old)
    other = ("ab" * 16, 2, 4096)
    assert bench.area.take(other, 1) == []
    slot.finish("stop")
    await bench.look(old)
    assert len(bench.area.take(other, 3)) == 3
    assert MemoryBench(tmp_path, holder, bench.memory).area.slabs_used == 0
