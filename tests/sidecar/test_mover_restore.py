"""Restores between pools, through a real mover and a real holder."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import MoverError, Reason, RestoreResult
from support.mover_rig import BLOCK_TOKENS, KEY, Processes, Worker, prompt_hash

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()
    # Every case here is one that the mover expects: none may show up as a fault of its own.
    assert "Traceback" not in started.log()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
async def mover(processes: Processes, holder: HolderClient) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover("--poll-s", "0.005"))
    yield client
    await client.close()


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "old", holder)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "new", holder, block_count=48, gap_bytes=100)
    yield worker
    worker.close()


async def until(mover: MoverClient, name: str, value: int) -> dict[str, int]:
    for _ in range(500):
        status = await mover.status()
        if status[name] >= value:
            return status
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not become {value}: {status}")


async def restore(
    mover: MoverClient, old: Worker, new: Worker, deadline_s: float = 5.0, session: SessionId = SESSION
) -> RestoreResult:
    return await mover.restore(
        session, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=deadline_s
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 8, 40])
async def test_every_position_but_the_last_arrives_whatever_the_cut(
    mover: MoverClient, old: Worker, new: Worker, count: int
) -> None:
    outputs = list(range(100, 100 + count))
    blocks, room = list(range(20, 3, -1)), [7, 3, 40, 9, 1, 30, 12, 2, 21, 22, 23, 24, 25]
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, outputs, blocks)
    tokens = len(PROMPT) + count - 1
    await until(mover, "blocks_summed", tokens // BLOCK_TOKENS)
    slot = new.wait(SESSION, PROMPT, outputs, room)
    result = await restore(mover, old, new)
    assert result.ok, result
    assert result.tokens == tokens
    assert slot.inbox() == (LoadState.DONE, tokens)
    assert new.right([*PROMPT, *outputs], range(tokens), room) == list(range(tokens))
    assert (result.blocks_verified, result.blocks_verified + result.blocks_unverified) == (
        tokens // BLOCK_TOKENS,
        -(-tokens // BLOCK_TOKENS),
    )
    assert result.bytes == -(-tokens // BLOCK_TOKENS) * old.layout.block_bytes


async def test_a_shorter_cut_than_the_journal_is_served(mover: MoverClient, old: Worker, new: Worker) -> None:
    outputs = list(range(100, 110))
    old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    slot = new.wait(SESSION, PROMPT, outputs[:6], [9, 8, 7])
    assert (await restore(mover, old, new)).tokens == 11
    assert slot.inbox() == (LoadState.DONE, 11)
    assert len(new.right([*PROMPT, *outputs[:6]], range(11), [9, 8, 7])) == 11


async def test_a_restore_waits_until_the_engine_has_made_room(mover: MoverClient, old: Worker, new: Worker) -> None:
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    task = asyncio.create_task(restore(mover, old, new))
    await asyncio.sleep(0.1)
    assert not task.done()
    slot = new.writer.admit(SESSION, 2, len(PROMPT), prompt_hash(PROMPT), [100, 101])
    assert slot is not None
    await asyncio.sleep(0.05)
    assert slot.inbox() == (LoadState.NONE, 0)
    slot.set_blocks([5, 6])
    slot.report(LoadState.WAITING, 0, 0)
    assert (await task).ok
    assert slot.inbox() == (LoadState.DONE, 7)


async def test_an_engine_that_never_makes_room_is_a_named_failure_in_time(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    old.run(SESSION, PROMPT, [100], [1, 2])
    began = time.monotonic()
    result = await restore(mover, old, new, 0.3)
    assert (result.ok, result.reason) == (False, "destination")
    assert 0.25 < time.monotonic() - began < 2


@pytest.mark.parametrize("damage", range(3))
async def test_a_block_that_changed_since_it_filled_fails_the_restore_and_is_not_copied(
    mover: MoverClient, old: Worker, new: Worker, damage: int
) -> None:
    outputs = list(range(100, 110))
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await until(mover, "blocks_summed", 3)
    at = old.layout.spans([1, 2, 3][damage])[2][0] + 17
    old.view[at] ^= 1
    slot = new.wait(SESSION, PROMPT, outputs, [9, 8, 7, 6])
    result = await restore(mover, old, new)
    assert (result.ok, result.reason, result.tokens) == (False, "checksum", 0)
    assert f"block {damage} differs" in result.error
    assert slot.inbox() == (LoadState.FAILED, 0)
    bad = new.layout.spans([9, 8, 7][damage])[2]
    assert bytes(new.view[bad[0] : bad[1]]) == bytes(bad[1] - bad[0])
    assert (await mover.status())["failures_checksum"] == 1
    verified = await mover.verify(old.arena, SESSION, 1)
    assert (verified.blocks_damaged, verified.tokens, verified.blocks_verified) == (1, damage * BLOCK_TOKENS, 2)


async def test_what_scribbles_in_a_dead_writers_tail_is_noticed_once_it_was_sealed(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    outputs = list(range(100, 108))
    old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await mover.seal(old.arena)
    sound = await mover.verify(old.arena, SESSION, 1)
    assert (sound.tokens, sound.verified_tokens, sound.blocks_unverified) == (13, 13, 0)
    old.view[old.layout.spans(4)[1][0]] ^= 1
    slot = new.wait(SESSION, PROMPT, outputs, [9, 8, 7, 6])
    assert (await restore(mover, old, new)).reason == "checksum"
    assert slot.inbox() == (LoadState.FAILED, 0)
    assert (await mover.verify(old.arena, SESSION, 1)).tokens == 3 * BLOCK_TOKENS


async def test_verify_says_what_is_known_good(mover: MoverClient, old: Worker) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, list(range(100, 108)), [1, 2, 3, 4])
    await until(mover, "blocks_summed", 3)
    found = await mover.verify(old.arena, SESSION, 1)
    assert (found.tokens, found.verified_tokens, found.blocks_unverified, found.blocks_damaged) == (13, 12, 1, 0)


async def test_another_prompt_other_tokens_another_key_or_layout_get_no_kv(
    mover: MoverClient, old: Worker, new: Worker, tmp_path: Path, holder: HolderClient
) -> None:
    old.run(SESSION, PROMPT, [100, 101, 102], [1, 2, 3])
    slot = new.wait(SESSION, [*PROMPT[:-1], 99], [100, 101], [5, 6])
    assert (await restore(mover, old, new)).reason == "prompt"
    assert slot.inbox() == (LoadState.FAILED, 0)
    slot.release()
    slot = new.wait(SESSION, PROMPT, [100, 999], [5, 6])
    assert (await restore(mover, old, new)).reason == "tokens"
    slot.release()
    slot = new.wait(SESSION, PROMPT, [100, 101, 102, 103], [5, 6, 7])
    assert (await restore(mover, old, new)).reason == "tokens"
    slot.release()
    slot = new.wait(SESSION, PROMPT, [100, 101], [5])
    assert (await restore(mover, old, new)).reason == "table"
    slot.release()

    other = Worker(tmp_path, "other", holder, key=KEY | {"model": "another"})
    slot = other.wait(SESSION, PROMPT, [100, 101], [5, 6])
    result = await restore(mover, old, other)
    assert (result.reason, slot.inbox()) == ("key", (LoadState.FAILED, 0))
    assert "differ in model" in result.error
    other.close()


async def test_a_session_that_finished_or_is_not_there_gives_no_kv(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    gone = new.wait(OTHER, PROMPT, [100], [5, 6])
    assert (await restore(mover, old, new, session=OTHER)).reason == "session"
    assert gone.inbox() == (LoadState.FAILED, 0)
    source = old.run(SESSION, PROMPT, [100, 101], [1, 2])
    source.finish("stop")
    new.wait(SESSION, PROMPT, [100], [7, 8])
    assert (await restore(mover, old, new)).reason == "finished"


async def test_a_preempted_session_has_no_kv_until_it_has_written_another_token(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    outputs = [100, 101, 102]
    await mover.watch(old.arena, "old")
    source = old.run(SESSION, PROMPT, outputs, [1, 2, 3])
    await until(mover, "blocks_summed", 2)
    source.set_blocks([11, 12, 13])
    slot = new.wait(SESSION, PROMPT, outputs, [5, 6])
    assert (await restore(mover, old, new)).reason == "incomplete"
    slot.release()
    await asyncio.sleep(0.1)
    old.write([*PROMPT, *outputs], range(8), [11, 12, 13])
    old.decode(source, PROMPT, outputs, [11, 12, 13], 103)
    await until(mover, "blocks_summed", 4)
    new.wait(SESSION, PROMPT, outputs, [5, 6, 7])
    result = await restore(mover, old, new)
    assert result.ok, result
    assert len(new.right([*PROMPT, *outputs], range(9), [5, 6, 7])) == 9


async def test_a_session_that_was_killed_while_it_was_restored_gives_no_kv(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    old.wait(SESSION, PROMPT, [100, 101], [1, 2], generation=1)
    new.wait(SESSION, PROMPT, [100, 101], [5, 6])
    assert (await restore(mover, old, new)).reason == "incomplete"


async def test_a_restored_session_can_be_restored_again(
    mover: MoverClient, old: Worker, new: Worker, tmp_path: Path, holder: HolderClient
) -> None:
    outputs = [100, 101, 102]
    old.run(SESSION, PROMPT, outputs, [1, 2, 3])
    second = new.wait(SESSION, PROMPT, outputs, [5, 6, 7])
    assert (await restore(mover, old, new)).ok
    second.report(LoadState.DONE, 8, 0)
    third = Worker(tmp_path, "third", holder)
    third.wait(SESSION, PROMPT, outputs, [8, 9], generation=3)
    result = await mover.restore(SESSION, source=(new.arena, 2), to_arena=third.arena, to_generation=3, deadline_s=5)
    assert result.ok, result
    assert len(third.right([*PROMPT, *outputs], range(8), [8, 9])) == 8
    third.close()


async def test_in_place_nothing_is_copied_and_blocks_are_still_compared(
    mover: MoverClient, old: Worker, tmp_path: Path, holder: HolderClient
) -> None:
    outputs = list(range(100, 107))
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, outputs, [1, 2, 3])
    await until(mover, "blocks_summed", 3)
    again = Worker(tmp_path, "again", holder, pool=old)
    slot = again.wait(SESSION, PROMPT, outputs, [1, 2, 3])
    result = await restore(mover, old, again)
    assert (result.ok, result.bytes, result.blocks_verified) == (True, 0, 3)
    assert slot.inbox() == (LoadState.DONE, 12)
    again.wait(OTHER, PROMPT, outputs, [3, 2, 1])
    old.run(OTHER, PROMPT, outputs, [1, 2, 3])
    assert (await restore(mover, old, again, session=OTHER)).reason == "overlap"
    again.writer.close()
    again.view.close()


async def test_sixteen_restores_at_once_get_each_its_own_kv(mover: MoverClient, old: Worker, new: Worker) -> None:
    sessions = [SessionId(f"{n:032x}") for n in range(16)]
    for n, session in enumerate(sessions):
        old.run(session, [n, *PROMPT], [200 + n, 201 + n], [4 * n, 4 * n + 1])
    slots = [new.wait(s, [n, *PROMPT], [200 + n, 201 + n], [3 * n + 1, 3 * n]) for n, s in enumerate(sessions)]
    results = await asyncio.gather(*(restore(mover, old, new, session=s) for s in sessions))
    assert all(result.ok for result in results), results
    for n, slot in enumerate(slots):
        assert slot.inbox() == (LoadState.DONE, 8)
        assert len(new.right([n, *PROMPT, 200 + n], range(8), [3 * n + 1, 3 * n])) == 8


async def test_a_restore_goes_on_when_the_holder_was_killed_and_came_back(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker
) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, [100, 101, 102], [1, 2])
    await until(mover, "blocks_summed", 2)
    assert processes.holder is not None
    processes.holder.kill()
    processes.holder.wait()
    slot = new.wait(SESSION, PROMPT, [100, 101, 102], [5, 6])
    result = await restore(mover, old, new)
    assert (result.reason, slot.inbox()) == ("pool", (LoadState.FAILED, 0))
    assert "start it" in result.error
    slot.release()
    client = processes.start_holder()
    client.put(new.pool_name, new.fd, new.meta.to_json())
    new.wait(SESSION, PROMPT, [100, 101, 102], [5, 6])
    # The old pool is not held any more, but mapped.
    assert (await restore(mover, old, new)).ok
    assert len(new.right([*PROMPT, 100, 101], range(8), [5, 6])) == 8


async def test_an_arena_whose_file_is_gone_is_still_restored_from(mover: MoverClient, old: Worker, new: Worker) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, [100, 101, 102], [1, 2])
    await until(mover, "blocks_summed", 2)
    os.unlink(old.arena)
    new.wait(SESSION, PROMPT, [100, 101, 102], [5, 6])
    assert (await restore(mover, old, new)).ok
    await mover.release(old.arena)
    with pytest.raises(MoverError, match="is not there") as caught:
        await mover.watch(old.arena, "old")
    assert caught.value.reason is Reason.ARENA
    status = await mover.status()
    assert (status["arenas"], status["pools"], status["sums"]) == (1, 1, 0)


async def test_a_destination_that_gives_up_while_it_is_served_gets_no_more_bytes(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    slot = new.wait(SESSION, PROMPT, [100, 101], [5, 6])
    slot.report(LoadState.FAILED, 0, 0)
    assert (await restore(mover, old, new, 1.0)).reason == "gone"
    assert new.right([*PROMPT, 100], range(7), [5, 6]) == []


async def test_a_mover_that_is_told_to_end_does_so_in_good_order(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker
) -> None:
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    task = asyncio.create_task(restore(mover, old, new, 5.0))
    await asyncio.sleep(0.1)
    assert processes.mover is not None
    processes.mover.terminate()
    assert processes.mover.wait(10) == 0
    with pytest.raises(MoverError) as caught:
        await task
    assert caught.value.reason is Reason.UNREACHABLE
    assert not processes.mover_path.exists()


async def test_a_worker_with_more_ranks_than_can_commit_is_refused_with_its_reason(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    new.writer.publish({"key": KEY, "pools": [f"new/1/{rank}" for rank in range(33)]})
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    slot = new.wait(SESSION, PROMPT, [100, 101], [5, 6])
    result = await restore(mover, old, new)
    assert (result.reason, slot.inbox()) == ("ranks", (LoadState.FAILED, 0))


async def test_blocks_are_summed_while_an_engine_decodes_and_forgotten_when_it_is_done(
    mover: MoverClient, old: Worker
) -> None:
    await mover.watch(old.arena, "old")
    outputs = [100]
    slot = old.run(SESSION, PROMPT, outputs, list(range(20)))
    for token in range(101, 141):
        old.decode(slot, PROMPT, outputs, list(range(20)), token)
        await asyncio.sleep(0.002)
    status = await until(mover, "blocks_summed", 11)
    assert (status["sums"], status["lag_blocks"], status["sessions_live"]) == (11, 0, 1)
    slot.finish("length")
    for _ in range(200):
        status = await mover.status()
        if not status["sums"]:
            break
        await asyncio.sleep(0.01)
    assert (status["sums"], status["sessions_live"]) == (0, 0)


async def test_an_engine_that_goes_on_without_waiting_ends_the_restore_at_once(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    slot = new.writer.admit(SESSION, 2, len(PROMPT), prompt_hash(PROMPT), [100, 101])
    assert slot is not None
    slot.append_tokens([102])
    began = time.monotonic()
    assert (await restore(mover, old, new, 10.0)).reason == "gone"
    assert time.monotonic() - began < 2
    assert slot.inbox() == (LoadState.NONE, 0)


@pytest.mark.parametrize("watched", [True, False])
async def test_blocks_that_were_filled_and_written_as_a_new_table_keep_their_kv(
    mover: MoverClient, old: Worker, new: Worker, tmp_path: Path, holder: HolderClient, watched: bool
) -> None:
    outputs = [100, 101, 102]
    if watched:
        await mover.watch(new.arena, "new")
    old.run(SESSION, PROMPT, outputs, [1, 2, 3])
    second = new.wait(SESSION, PROMPT, outputs, [5, 6])
    assert (await restore(mover, old, new)).ok
    second.set_blocks([5, 6, 7])
    second.report(LoadState.DONE, 8, 0)
    third = Worker(tmp_path, "third", holder)
    third.wait(SESSION, PROMPT, outputs, [8, 9], generation=3)

    async def again(generation: int) -> RestoreResult:
        return await mover.restore(
            SESSION, source=(new.arena, 2), to_arena=third.arena, to_generation=generation, deadline_s=5
        )

    assert (await again(3)).ok
    second.append_tokens([103])
    third.wait(SESSION, PROMPT, outputs, [10, 11], generation=4)
    assert (await again(4)).ok
    # The same blocks once more: now it was preempted in between.
    second.set_blocks(())
    second.set_blocks([5, 6, 7])
    third.wait(SESSION, PROMPT, outputs, [12, 13], generation=5)
    assert (await again(5)).reason == "incomplete"
    third.close()
