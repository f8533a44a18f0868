"""Snapshots to disk and restores from there, through a real mover; the engines are gone in between."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.disk_store import DiskStore
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import MoverError, RestoreResult
from support.mover_rig import KEY, Processes, Worker

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
async def mover(processes: Processes, holder: HolderClient, root: Path) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover("--poll-s", "0.005", "--store", str(root)))
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


async def restore(mover: MoverClient, new: Worker, session: SessionId = SESSION) -> RestoreResult:
    return await mover.restore(session, source=None, to_arena=new.arena, to_generation=2, deadline_s=5)


def chunks(root: Path) -> list[Path]:
    return sorted(path for path in (root / "chunks").rglob("*") if path.is_file())


async def restart(processes: Processes, mover: MoverClient, root: Path, *options: str) -> MoverClient:
    assert processes.mover is not None
    processes.mover.kill()
    processes.mover.wait()
    await mover.close()
    processes.start_mover("--store", str(root), *options)
    return mover


async def test_a_snapshot_outlives_holder_pool_and_mover(
    processes: Processes, mover: MoverClient, old: Worker, tmp_path: Path, root: Path
) -> None:
    outputs = list(range(100, 109))
    old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    taken = await mover.snapshot(old.arena)
    assert (taken.stored, taken.kv_tokens, taken.dropped) == (1, 14, 0)
    assert processes.holder is not None
    processes.holder.kill()
    processes.holder.wait()
    await restart(processes, mover, root)
    new = Worker(tmp_path, "new", processes.start_holder())

    found = await mover.stored(SESSION)
    assert (found.found, found.generation, found.kv_len, found.outputs) == (True, 1, 14, 9)
    slot = new.wait(SESSION, PROMPT, outputs[: found.outputs], [9, 8, 7, 6])
    result = await restore(mover, new)
    assert result.ok, result
    assert (result.tokens, result.blocks_verified, result.blocks_unverified) == (14, 4, 0)
    assert slot.inbox() == (LoadState.DONE, 14)
    assert len(new.right([*PROMPT, *outputs], range(14), [9, 8, 7, 6])) == 14
    new.close()


async def test_a_session_that_went_on_after_its_snapshot_goes_on_from_there(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    outputs = [100, 101, 102]
    slot = old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await mover.snapshot(old.arena, SESSION)
    for token in range(103, 108):
        old.decode(slot, PROMPT, outputs, [1, 2, 3, 4], token)
    found = await mover.stored(SESSION)
    assert (found.kv_len, found.outputs) == (8, 3)
    new.wait(SESSION, PROMPT, outputs[:3], [9, 8])
    assert (await restore(mover, new)).ok
    assert len(new.right([*PROMPT, *outputs], range(8), [9, 8])) == 8


async def test_more_than_what_is_stored_is_refused(mover: MoverClient, old: Worker, new: Worker) -> None:
    outputs = [100, 101, 102]
    slot = old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await mover.snapshot(old.arena, SESSION)
    old.decode(slot, PROMPT, outputs, [1, 2, 3, 4], 103)
    waiting = new.wait(SESSION, PROMPT, outputs, [9, 8, 7])
    assert (await restore(mover, new)).reason == "tokens"
    assert waiting.inbox() == (LoadState.FAILED, 0)


async def test_full_blocks_are_written_once_and_only_the_tail_again(
    mover: MoverClient, old: Worker, root: Path
) -> None:
    outputs = [100, 101, 102]
    slot = old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await mover.snapshot(old.arena)
    first = {path: path.stat().st_mtime_ns for path in chunks(root)}
    assert len(first) == 2
    assert (await mover.snapshot(old.arena)).unchanged == 1
    for token in range(103, 106):
        old.decode(slot, PROMPT, outputs, [1, 2, 3, 4], token)
    await mover.snapshot(old.arena)
    second = {path: path.stat().st_mtime_ns for path in chunks(root)}
    assert first.items() <= second.items()
    assert len(second) == 3


async def test_two_sessions_with_the_same_prompt_share_its_blocks(mover: MoverClient, old: Worker, root: Path) -> None:
    prompt = list(range(8))
    old.run(SESSION, prompt, [100, 101], [1, 2, 3])
    old.run(OTHER, prompt, [200, 201], [11, 12, 13])
    assert (await mover.snapshot(old.arena)).stored == 2
    assert len(chunks(root)) == 4


async def test_the_policy_takes_snapshots_by_itself_and_marks_what_is_over(
    processes: Processes, mover: MoverClient, old: Worker, root: Path
) -> None:
    await restart(processes, mover, root, "--snapshot-every-s", "0.01", "--tail-every-tokens", "4", "--poll-s", "0.005")
    await mover.watch(old.arena, "old")
    outputs = [100]
    slot = old.run(SESSION, PROMPT, outputs, list(range(10)))
    for token in range(101, 113):
        old.decode(slot, PROMPT, outputs, list(range(10)), token)
        await asyncio.sleep(0.02)
    for _ in range(200):
        found = await mover.stored(SESSION)
        if found.kv_len > 18 - 4:
            break
        await asyncio.sleep(0.01)
    assert 18 - 4 < found.kv_len <= 18
    status = await mover.status()
    assert 1 <= status["snapshots"] <= 4
    # What was stored is seen in the store a moment before the mover is told.
    for _ in range(200):
        if (await mover.status())["lag_tokens_max"] < 4:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("the newest snapshot is not counted")
    assert status["store_bytes"] > 0
    slot.finish("stop")
    reader = DiskStore(root, write=False)
    for _ in range(200):
        if all(line.finished for line in reader.list()):
            break
        await asyncio.sleep(0.01)
    assert all(line.finished for line in reader.list())


async def test_a_session_that_is_aborted_is_not_over(mover: MoverClient, old: Worker, root: Path) -> None:
    await mover.watch(old.arena, "old")
    slot = old.run(SESSION, PROMPT, [100, 101], [1, 2])
    await asyncio.sleep(0.05)
    await mover.snapshot(old.arena)
    slot.finish("abort")
    await asyncio.sleep(0.2)
    assert [line.finished for line in DiskStore(root, write=False).list()] == [False]
    await mover.finish(SESSION, 1)
    for _ in range(100):
        if DiskStore(root, write=False).list()[0].finished:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("finish was not carried out")


async def test_a_block_that_changed_since_it_filled_is_never_stored(
    mover: MoverClient, old: Worker, root: Path
) -> None:
    await mover.watch(old.arena, "old")
    old.run(SESSION, PROMPT, list(range(100, 110)), [1, 2, 3, 4])
    for _ in range(200):
        if (await mover.status())["blocks_summed"] == 3:
            break
        await asyncio.sleep(0.01)
    old.view[old.layout.spans(2)[1][0]] ^= 1
    with pytest.raises(MoverError, match="block 1 differs"):
        await mover.snapshot(old.arena, SESSION)
    assert not (await mover.stored(SESSION)).found
    assert chunks(root) == []


@pytest.mark.parametrize("fault", ["flipped", "half", "gone", "empty", "another", "directory"])
@pytest.mark.parametrize("ordinal", [0, 3])
async def test_a_damaged_store_is_noticed_and_the_engine_told_to_compute(
    mover: MoverClient, old: Worker, new: Worker, root: Path, fault: str, ordinal: int
) -> None:
    outputs = list(range(100, 109))
    old.run(SESSION, PROMPT, outputs, [1, 2, 3, 4])
    await mover.snapshot(old.arena)
    (path,) = (root / "sessions" / SESSION).iterdir()
    names = json.loads(path.read_bytes().partition(b"\n")[2])["chunks"]
    chunk = root / "chunks" / names[ordinal][:2] / names[ordinal]
    content = bytearray(chunk.read_bytes())
    match fault:
        case "flipped":
            content[len(content) // 2] ^= 4
            chunk.write_bytes(content)
        case "half":
            chunk.write_bytes(content[: len(content) // 2])
        case "empty":
            chunk.write_bytes(b"")
        case "another":
            other = root / "chunks" / names[1][:2] / names[1]
            chunk.write_bytes(other.read_bytes())
        case "directory":
            chunk.unlink()
            chunk.mkdir()
        case _:
            chunk.unlink()
    slot = new.wait(SESSION, PROMPT, outputs, [9, 8, 7, 6])
    result = await restore(mover, new)
    assert not result.ok
    assert result.reason == ("store" if fault in ("gone", "directory") else "corrupt")
    assert slot.inbox() == (LoadState.FAILED, 0)
    slot.release()
    # What is still there serves on: another session is stored and restored as ever.
    if fault != "directory":
        old.run(OTHER, PROMPT, outputs, [11, 12, 13, 14])
        await mover.snapshot(old.arena, OTHER)
        new.wait(OTHER, PROMPT, outputs, [9, 8, 7, 6])
        assert (await restore(mover, new, OTHER)).ok
        assert len(new.right([*PROMPT, *outputs], range(14), [9, 8, 7, 6])) == 14


async def test_a_torn_manifest_means_the_older_snapshot(
    mover: MoverClient, old: Worker, new: Worker, root: Path
) -> None:
    outputs = [100, 101]
    slot = old.run(SESSION, PROMPT, outputs, [1, 2, 3])
    await mover.snapshot(old.arena)
    old.decode(slot, PROMPT, outputs, [1, 2, 3], 102)
    await mover.snapshot(old.arena)
    newest = sorted((root / "sessions" / SESSION).iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-30])
    found = await mover.stored(SESSION)
    assert (found.kv_len, found.outputs) == (7, 2)
    new.wait(SESSION, PROMPT, outputs[:2], [9, 8])
    assert (await restore(mover, new)).ok
    assert (await mover.status())["store_corrupt"] >= 1


async def test_a_store_that_is_taken_away_stops_snapshots_and_nothing_else(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker, root: Path
) -> None:
    outputs = [100, 101, 102]
    old.run(SESSION, PROMPT, outputs, [1, 2])
    await asyncio.to_thread(shutil.rmtree, root)
    await asyncio.to_thread(root.write_text, "in the way")
    for _ in range(3):
        with pytest.raises(MoverError, match="check the folder"):
            await mover.snapshot(old.arena, SESSION)
    assert processes.log().count("event=snapshots_stopped serving=on") == 1
    slot = new.wait(SESSION, PROMPT, outputs, [9, 8])
    result = await mover.restore(SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert result.ok
    assert slot.inbox() == (LoadState.DONE, 8)
    assert (await mover.status())["store_errors"] >= 3


async def test_a_full_store_says_so_and_restores_go_on(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker, root: Path
) -> None:
    await restart(processes, mover, root, "--store-bytes-max", "2000")
    outputs = [100, 101, 102]
    old.run(SESSION, PROMPT, outputs, [1, 2])
    with pytest.raises(MoverError, match=r"is full .*raise its size"):
        await mover.snapshot(old.arena, SESSION)
    assert chunks(root) == []
    new.wait(SESSION, PROMPT, outputs, [9, 8])
    result = await mover.restore(SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert result.ok


async def test_a_stored_session_is_not_given_to_an_engine_with_another_key(
    mover: MoverClient, old: Worker, tmp_path: Path, holder: HolderClient
) -> None:
    old.run(SESSION, PROMPT, [100, 101], [1, 2])
    await mover.snapshot(old.arena)
    other = Worker(tmp_path, "other", holder, key=KEY | {"model": "n", "lora": None})
    slot = other.wait(SESSION, PROMPT, [100, 101], [5, 6])
    result = await restore(mover, other)
    assert (result.reason, slot.inbox()) == ("key", (LoadState.FAILED, 0))
    assert "differ in lora, model" in result.error
    other.close()


async def test_only_the_newest_owner_of_a_session_is_stored(mover: MoverClient, old: Worker, new: Worker) -> None:
    outputs = [100, 101, 102]
    old.run(SESSION, PROMPT, outputs, [1, 2])
    newer = new.run(SESSION, PROMPT, [*outputs, 103], [7, 8, 9], generation=2)
    await mover.watch(old.arena, "old")
    await mover.watch(new.arena, "new")
    for _ in range(200):
        if (await mover.status())["sessions_live"] == 2:
            break
        await asyncio.sleep(0.01)
    assert (await mover.snapshot(old.arena)).unchanged == 1
    assert (await mover.snapshot(new.arena)).stored == 1
    assert (await mover.stored(SESSION)).generation == 2
    newer.finish("stop")
    for _ in range(200):
        if (await mover.status())["sessions_live"] == 1:
            break
        await asyncio.sleep(0.01)
    assert (await mover.snapshot(old.arena)).unchanged == 1
    assert (await mover.stored(SESSION)).generation == 2


async def test_a_session_that_only_just_began_is_not_stored(mover: MoverClient, old: Worker) -> None:
    slot = old.writer.admit(SESSION, 1, len(PROMPT), "0" * 32)
    assert slot is not None
    slot.set_blocks([1, 2])
    assert (await mover.snapshot(old.arena)).unchanged == 1
    assert not (await mover.stored(SESSION)).found
