"""Restores between pools in VRAM, through a real mover, a real holder and engines that are killed."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, LoadState
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.device_pool import DevicePool, open_device_pool
from midstream.sidecar.mover.process import FAULT_STATUS
from midstream.sidecar.mover.protocol import MoverError, Reason
from support.device_rig import DeviceWorker, block_bytes, read_bytes, write_bytes
from support.mover_rig import Processes, layout_of, prompt_hash

pytestmark = pytest.mark.gpu

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = list(range(100, 140))

ENGINE = """
import sys
import time
from pathlib import Path
from support.device_rig import DeviceWorker
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
folder, name, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
worker = DeviceWorker(folder, name, HolderClient(folder / "holder.sock"))
sessions = []
for n in range(4):
    prompt, outputs, blocks = [n, 6, 7, 8, 9], [100 + n], list(range(60 * n, 60 * n + 60))
    slot = worker.run(SessionId(f"{first + n:032x}"), prompt, outputs, blocks[:2])
    sessions.append((slot, prompt, outputs, blocks, 2))
print("decoding", flush=True)
token = 1000
while len(sessions[0][2]) < 220:
    time.sleep(0.0005)
    for n, (slot, prompt, outputs, blocks, used) in enumerate(sessions):
        token += 1
        needed = (len(prompt) + len(outputs)) // 4 + 1
        if needed > used:
            slot.append_blocks(blocks[used:needed])
            sessions[n] = (slot, prompt, outputs, blocks, needed)
        worker.decode(slot, prompt, outputs, blocks, token)
print("done", flush=True)
sys.stdin.read()
"""


# A mover whose kernels read where nothing is.
FAULTY = """
import sys
from midstream.sidecar.mover import device_kernels, process
sound = "u64 sum = 0;"
assert sound in device_kernels.SOURCE
device_kernels.SOURCE = device_kernels.SOURCE.replace(sound, "u64 sum = *reinterpret_cast<const volatile u64*>(8);")
sys.exit(process.main(sys.argv[1:]))
"""


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
async def mover(processes: Processes, holder: HolderClient, tmp_path: Path) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover("--poll-s", "0.005", "--store", str(tmp_path / "store")))
    yield client
    await client.close()


@pytest.fixture
async def fast_mover(processes: Processes, holder: HolderClient, tmp_path: Path) -> AsyncIterator[MoverClient]:
    """A mover as a sidecar starts it, without what makes faults show and everything slow."""
    path = tmp_path / "fast.sock"
    command = [sys.executable, "-m", "midstream.sidecar.mover", "--socket", str(path)]
    command += ["--holder", str(processes.holder_path), "--parent-pid", str(os.getpid())]
    with (tmp_path / "mover.log").open("ab") as log:
        started = await asyncio.to_thread(subprocess.Popen, command, stderr=log)
    for _ in range(1000):
        if path.exists():
            break
        await asyncio.sleep(0.01)
    client = MoverClient(path)
    yield client
    await client.close()
    started.terminate()
    assert await asyncio.to_thread(started.wait, 30) == 0


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[DeviceWorker]:
    worker = DeviceWorker(tmp_path, "old", holder)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[DeviceWorker]:
    worker = DeviceWorker(tmp_path, "new", holder, layout=layout_of(300, gap_bytes=64))
    yield worker
    worker.close()


async def until(mover: MoverClient, name: str, value: int) -> None:
    for _ in range(6000):
        if (await mover.status())[name] >= value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not become {value}")


async def start_engine(folder: Path, name: str, first: int) -> "subprocess.Popen[str]":
    engine = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", ENGINE, str(folder), name, str(first)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert await asyncio.to_thread(engine.stdout.readline) == "decoding\n"
    return engine


async def test_every_session_of_a_killed_engine_goes_on_with_the_very_same_kv(
    mover: MoverClient, holder: HolderClient, new: DeviceWorker, tmp_path: Path
) -> None:
    chance = random.Random(5)
    lengths: set[int] = set()
    await mover.watch(new.arena, "new")
    for kill in range(4):
        name, from_disk = f"engine{kill}", kill == 3
        engine = await start_engine(tmp_path, name, 4 * kill)
        arena = tmp_path / f"{name}.arena"
        await mover.watch(arena, name)
        await asyncio.sleep(chance.uniform(0.0, 0.15))
        if from_disk:
            await mover.snapshot(arena)
        engine.send_signal(signal.SIGKILL)
        await asyncio.to_thread(engine.communicate)
        await mover.seal(arena)
        reader, waiting = ArenaReader(arena), []
        for slot in reader.slots():
            n = int(slot.session, 16) % 4
            prompt, outputs = [n, 6, 7, 8, 9], reader.journal(slot)
            if from_disk:
                outputs = outputs[: (await mover.stored(slot.session)).outputs]
            room = chance.sample(range(75 * n, 75 * n + 75), 70)
            waits = new.wait(slot.session, prompt, outputs, room, 2 + kill)
            waiting.append((slot.session, waits, [*prompt, *outputs], room))
        reader.close()
        assert len(waiting) == 4
        lengths.add(len(waiting[0][2]))
        source = None if from_disk else (arena, 1)
        results = await asyncio.gather(
            *(
                mover.restore(session, source=source, to_arena=new.arena, to_generation=2 + kill, deadline_s=20)
                for session, *_ in waiting
            )
        )
        for result, (_, waits, tokens, room) in zip(results, waiting, strict=True):
            assert result.ok, result
            positions = range(len(tokens) - 1)
            assert waits.inbox() == (LoadState.DONE, len(positions))
            assert new.right(tokens, positions, room) == list(positions)
            assert from_disk or result.blocks_unverified == 0
            waits.finish("stop")
        await mover.release(arena)
        holder.drop(f"{name}/1/0")
    assert len(lengths) > 1
    status = await mover.status()
    assert (status["restores"], status["restores_failed"], status["pools"]) == (16, 0, 1)


async def test_a_byte_that_changed_in_the_pool_of_the_dead_is_found_and_its_session_gets_nothing(
    mover: MoverClient, old: DeviceWorker, new: DeviceWorker
) -> None:
    blocks, room = list(range(20, 32)), list(range(40, 52))
    old.run(SESSION, PROMPT, OUTPUTS, blocks)
    await mover.watch(old.arena, "old")
    await until(mover, "blocks_summed", 11)
    await mover.seal(old.arena)
    assert (await mover.status())["blocks_summed"] == 12
    # In the tail, which only sealing has summed, and in the middle.
    for ordinal in (11, 4):
        start, _ = old.layout.spans(blocks[ordinal])[3]
        kept = read_bytes(old.address + start, 1)
        write_bytes(old.address + start, bytes([kept[0] ^ 1]))
        others = [block_bytes(new.address, new.layout, block) for block in (39, 52)]
        waits = new.wait(SESSION, PROMPT, OUTPUTS, room, 2 + ordinal)
        result = await mover.restore(
            SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=2 + ordinal, deadline_s=5
        )
        assert (result.ok, result.reason) == (False, "checksum")
        assert f"block {ordinal} " in result.error
        assert waits.inbox() == (LoadState.FAILED, 0)
        assert [block_bytes(new.address, new.layout, block) for block in (39, 52)] == others
        waits.finish("abort")
        verified = await mover.verify(old.arena, SESSION, 1)
        assert (verified.blocks_damaged, verified.tokens) == (1, ordinal * 4)
        write_bytes(old.address + start, kept)


async def test_a_shorter_cut_than_what_was_summed_is_served(
    mover: MoverClient, old: DeviceWorker, new: DeviceWorker
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, range(20, 32))
    await mover.seal(old.arena)
    waits = new.wait(SESSION, PROMPT, OUTPUTS[:13], [7, 40, 9, 12, 2])
    others = [block_bytes(new.address, new.layout, block) for block in (8, 10, 41)]
    result = await mover.restore(SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert (result.ok, result.blocks_verified, result.blocks_unverified) == (True, 5, 0)
    assert waits.inbox() == (LoadState.DONE, 18)
    assert new.right([*PROMPT, *OUTPUTS], range(18), [7, 40, 9, 12, 2]) == list(range(18))
    assert [block_bytes(new.address, new.layout, block) for block in (8, 10, 41)] == others


async def test_in_place_blocks_are_compared_and_none_is_copied(
    mover: MoverClient, old: DeviceWorker, holder: HolderClient, tmp_path: Path
) -> None:
    blocks = list(range(7, 19))
    old.run(SESSION, PROMPT, OUTPUTS, blocks)
    await mover.seal(old.arena)
    # The restarted engine's own name for the same memory.
    again = DeviceWorker(tmp_path, "again", holder, adopted=old)
    again.wait(SESSION, PROMPT, OUTPUTS, blocks)
    result = await mover.restore(SESSION, source=(old.arena, 1), to_arena=again.arena, to_generation=2, deadline_s=5)
    assert (result.ok, result.bytes, result.blocks_verified) == (True, 0, 12)
    again.writer.close()


async def test_an_error_of_the_card_ends_the_mover_and_the_next_one_takes_nothing_that_it_may_have_touched(
    holder: HolderClient, processes: Processes, old: DeviceWorker, new: DeviceWorker, tmp_path: Path
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, range(20, 32))
    waits = new.wait(SESSION, PROMPT, OUTPUTS, range(40, 52))
    # The next mover finds at its own socket what this one has noted.
    path = processes.mover_path
    command = [sys.executable, "-c", FAULTY, "--socket", str(path), "--holder", str(processes.holder_path)]
    faulty = await asyncio.to_thread(subprocess.Popen, command, stderr=subprocess.PIPE, text=True)
    for _ in range(1000):
        if path.exists():
            break
        await asyncio.sleep(0.01)
    client = MoverClient(path)
    # It may be gone before it has answered on its socket.
    with contextlib.suppress(MoverError):
        result = await client.restore(
            SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=20
        )
        assert not result.ok
    await client.close()
    _, log = await asyncio.to_thread(faulty.communicate, timeout=30)
    assert faulty.returncode == FAULT_STATUS, log
    assert "event=gpu_failed" in log
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in log
    assert waits.inbox() == (LoadState.FAILED, 0)
    client = MoverClient(processes.start_mover())
    again = new.wait(SESSION, PROMPT, OUTPUTS, range(60, 72), generation=3)
    result = await client.restore(SESSION, source=(old.arena, 1), to_arena=new.arena, to_generation=3, deadline_s=20)
    assert (result.ok, result.reason) == (False, "fault"), result
    assert again.inbox() == (LoadState.FAILED, 0)
    for request in (client.verify(old.arena, SESSION, 1), client.seal(old.arena), client.sound(old.arena)):
        with pytest.raises(MoverError) as caught:
            await request
        assert caught.value.reason is Reason.FAULT
    # The card works: an engine that came after the fault is restored from, into the one that lives on.
    later = DeviceWorker(tmp_path, "later", holder)
    later.run(OTHER, PROMPT, OUTPUTS, range(20, 32))
    waits = new.wait(OTHER, PROMPT, OUTPUTS, range(80, 92), generation=4)
    result = await client.restore(OTHER, source=(later.arena, 1), to_arena=new.arena, to_generation=4, deadline_s=20)
    assert result.ok, result
    assert waits.inbox() == (LoadState.DONE, 45)
    assert new.right([*PROMPT, *OUTPUTS], range(45), range(80, 92)) == list(range(45))
    await client.close()
    later.close()


@pytest.fixture
def devices() -> Iterator[Devices]:
    """The GPUs as a mover in this process has them."""
    opened = Devices(lambda text: pytest.fail(text))
    yield opened
    opened.close()


def _opened(devices: Devices, holder: HolderClient, name: str) -> DevicePool:
    fd, body = holder.get(name)
    pool = open_device_pool(devices, name, fd, PoolMeta.from_json(body))
    os.close(fd)
    return pool


def test_gpus_that_were_closed_or_dropped_can_be_opened_again(tmp_path: Path, holder: HolderClient) -> None:
    worker = DeviceWorker(tmp_path, "one", holder)
    for closed in (True, True, False, False, True):
        opened = Devices(lambda text: pytest.fail(text))
        pool = _opened(opened, holder, "one/1/0")
        raws = list(pool.gather([1, 2], []))
        pool.scatter(raws, [1, 2])
        del pool
        if closed:
            opened.close()
    worker.close()


@pytest.mark.timeout(300)
async def test_thirty_two_sessions_that_die_together_are_back_at_the_speed_of_the_memory(
    fast_mover: MoverClient, holder: HolderClient, devices: Devices, tmp_path: Path
) -> None:
    mover = fast_mover
    count, tokens = int(os.environ.get("MIDSTREAM_TEST_SESSIONS", "32")), 4000
    per_session = tokens // 16
    block_count = count * per_session
    size = 64 << 10
    planes = tuple(Plane(n * block_count * size, size, size) for n in range(32))
    form = PoolLayout(block_count, 16, planes)
    old = DeviceWorker(tmp_path, "old", holder, layout=form)
    new = DeviceWorker(tmp_path, "new", holder, layout=form)
    # Of an odd length, so that no two blocks are alike.
    raw = random.Random(1).randbytes((64 << 20) + 80)
    for at in range(0, form.end, len(raw)):
        write_bytes(old.address + at, raw[: form.end - at])
    prompt, outputs = list(range(tokens - 300)), list(range(301))
    chance = random.Random(2)
    sources, rooms = (chance.sample(range(block_count), block_count) for _ in range(2))
    names = [SessionId(f"{n + 1:032x}") for n in range(count)]
    mine = [slice(n * per_session, (n + 1) * per_session) for n in range(count)]
    await mover.watch(new.arena, "new")
    await mover.watch(old.arena, "old")
    for name, part in zip(names, mine, strict=True):
        slot = old.writer.admit(name, 1, len(prompt), prompt_hash(prompt))
        assert slot is not None
        slot.set_blocks(sources[part])
        slot.append_tokens(outputs)
    began = time.monotonic()
    await until(mover, "blocks_summed", block_count)
    print(f"\nsummed while serving, in looks with pauses: {form.end / (time.monotonic() - began) / 1e9:.1f} GB/s")
    await mover.seal(old.arena)
    assert (await mover.status())["blocks_summed"] == block_count
    orders = [
        asyncio.create_task(
            mover.restore(name, source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=20)
        )
        for name in names
    ]
    await until(mover, "restores", count)
    began = time.monotonic()
    for name, part in zip(names, mine, strict=True):
        new.wait(name, prompt, outputs, rooms[part])
    admitted_s = time.monotonic() - began
    results = await asyncio.gather(*orders)
    seconds = time.monotonic() - began
    assert all(result.ok and result.blocks_verified == per_session for result in results), results
    slowest = max(result.seconds for result in results)
    print(
        f"{count} sessions, {form.end / 1e9:.1f} GB: waiting after {admitted_s:.4f} s, back after {seconds:.4f} s "
        f"({form.end / seconds / 1e9:.0f} GB/s), the slowest of the mover's own {slowest:.4f} s"
    )
    found = _opened(devices, holder, "new/1/0").sum_blocks(rooms)
    assert found == _opened(devices, holder, "old/1/0").sum_blocks(sources)
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    listed = await asyncio.to_thread(subprocess.check_output, query, text=True)
    print(f"memory on the card by process, of which the mover is one:\n{listed}")
    old.close()
    new.close()
