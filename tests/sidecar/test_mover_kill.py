"""An engine that is killed with SIGKILL while it decodes: all its sessions go on from the held pool, bit for bit."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, LoadState
from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from support.mover_rig import Processes, Worker

ENGINE = """
import sys
from pathlib import Path
from support.mover_rig import Worker
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
worker = Worker(folder, name, HolderClient(folder / "holder.sock"), block_count=256)
sessions = []
for n in range(count):
    prompt, outputs, blocks = [n, 6, 7, 8, 9], [100 + n], list(range(60 * n, 60 * n + 60))
    slot = worker.run(SessionId(f"{n + 1:032x}"), prompt, outputs, blocks[:2])
    sessions.append((slot, prompt, outputs, blocks, 2))
print("decoding", flush=True)
token = 1000
while len(sessions[0][2]) < 220:
    for n, (slot, prompt, outputs, blocks, used) in enumerate(sessions):
        token += 1
        needed = (len(prompt) + len(outputs)) // 4 + 1
        if needed > used:
            slot.append_blocks(blocks[used:needed])
            sessions[n] = (slot, prompt, outputs, blocks, needed)
        worker.decode(slot, prompt, outputs, blocks, token)
print("done", flush=True)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()
    assert "Traceback" not in started.log()


async def test_every_session_of_a_killed_engine_goes_on_with_the_very_same_kv(
    processes: Processes, tmp_path: Path
) -> None:
    holder = processes.start_holder()
    mover = MoverClient(processes.start_mover("--poll-s", "0.005", "--store", str(tmp_path / "store")))
    standby = Worker(tmp_path, "standby", holder, block_count=300, gap_bytes=64)
    chance = random.Random(5)
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    lengths: set[int] = set()
    for kill in range(6):
        name = f"engine{kill}"
        engine = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-c", ENGINE, str(tmp_path), name, "4"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdout is not None
        assert await asyncio.to_thread(engine.stdout.readline) == "decoding\n"
        arena = tmp_path / f"{name}.arena"
        await mover.watch(arena, name)
        await asyncio.sleep(chance.uniform(0.0, 0.15))
        if kill % 3 == 2:
            await mover.snapshot(arena)
        engine.send_signal(signal.SIGKILL)
        await asyncio.to_thread(engine.communicate)

        reader = ArenaReader(arena)
        restored = []
        for slot in reader.slots():
            n = int(slot.session, 16) - 1
            prompt, outputs = [n, 6, 7, 8, 9], reader.journal(slot)
            source: tuple[Path, int] | None = (arena, 1)
            if kill % 3 == 2:
                found = await mover.stored(slot.session)
                outputs, source = outputs[: found.outputs], None
            generation = 2 + kill
            room = chance.sample(range(75 * n, 75 * n + 75), 70)
            waiting = standby.wait(slot.session, prompt, outputs, room, generation)
            restored.append((slot.session, source, generation, waiting, [*prompt, *outputs], room))
        reader.close()
        assert len(restored) == 4
        lengths.add(len(restored[0][4]))
        results = await asyncio.gather(
            *(
                mover.restore(SessionId(s), source=f, to_arena=standby.arena, to_generation=g, deadline_s=20)
                for s, f, g, *_ in restored
            )
        )
        for result, (_, _, _, waiting, tokens, room) in zip(results, restored, strict=True):
            assert result.ok, result
            positions = range(len(tokens) - 1)
            assert waiting.inbox() == (LoadState.DONE, len(positions))
            assert standby.right(tokens, positions, room) == list(positions)
            waiting.finish("stop")
        await mover.release(arena)
        holder.drop(f"{name}/1/0")
    # They were killed at different tokens, and not when all was said.
    assert len(lengths) > 1
    assert min(lengths) < 5 + 220
    status = await mover.status()
    assert (status["restores"], status["restores_failed"]) == (24, 0)
    assert status["blocks_verified"] > 0
    assert status["pools"] == 1
    await mover.close()
    standby.close()
