"""Sidecars whose memory is scribbled upon, whose folder is removed, and all of whose processes die at once.

Whatever is told to the client as exact must be so, and in any case nothing that it had is said again or otherwise.
"""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.held import HolderClient, map_pool
from midstream.session.layout import PoolMeta
from support.sidecars import BLOCK_TOKENS, Sidecar, outcome_of, require_whole, stop_process, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


# One sidecar for all but the last test: none of these attacks may leave it worse than it was.
@pytest.fixture
def attacked(kept: Callable[[], Sidecar]) -> Sidecar:
    return kept()


BODY: dict[str, Any] = {"prompt": "Nobody may tell " * 6, "temperature": 0.8, "seed": 5, "max_tokens": 300}
CUT = 100
Harm = Callable[[dict[str, Any]], Awaitable[None]]


async def harmed(sidecar: Sidecar, http: aiohttp.ClientSession, harm: Harm) -> tuple[Answer, Answer]:
    """What the answer should be, and what it is when its worker is harmed after `CUT` tokens."""
    wanted = await sidecar.stream(http, BODY)
    require_whole(wanted)
    done: list[dict[str, Any]] = []

    async def once(answer: Answer) -> None:
        if not done and len(answer.token_ids) >= CUT:
            done.append(await sidecar.process.serving(http))
            await harm(done[0])

    answer = await sidecar.stream(http, BODY, once)
    assert done
    require_whole(answer)
    assert answer.token_ids[:CUT] == wanted.token_ids[:CUT]
    assert len(answer.token_ids) == len(wanted.token_ids)
    return wanted, answer


def flip(memory: Any, places: list[int]) -> None:
    """One bit of each of these bytes."""
    for place in places:
        memory[place] ^= 0x10


async def test_kv_that_was_scribbled_upon_after_it_was_summed_is_not_used(
    attacked: Sidecar, http: aiohttp.ClientSession
) -> None:
    await attacked.ready(http)

    async def scribble(worker: dict[str, Any]) -> None:
        stop_process(worker["pid"])
        # The mover sums blocks a moment after they are full.
        await asyncio.sleep(0.5)
        with closing(attacked.arena(worker)) as arena:
            [slot] = [slot for slot in arena.slots() if slot.state is SlotState.LIVE]
            block = arena.table(slot).blocks[CUT // BLOCK_TOKENS - 1]
        fd, told = HolderClient(attacked.process.state_dir / "holder.sock").get(worker["pools"][0])
        meta = PoolMeta.from_json(told)
        with closing(map_pool(fd, meta.size_bytes)) as pool:
            os.close(fd)
            flip(pool, [start for start, _ in meta.layout.spans(block)])
        kill_worker(worker["pid"], Victim.TREE)

    _, answer = await harmed(attacked, http, scribble)
    assert outcome_of(answer) == ("recomputed", 1)
    assert (await attacked.sessions(http))[-1]["outcomes"][-1]["detail"] == "checksum"


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_damaged_arena_costs_exactness_at_most_and_never_the_truth(
    seed: int, attacked: Sidecar, http: aiohttp.ClientSession
) -> None:
    await attacked.ready(http)
    rng = random.Random(seed)

    async def scribble(worker: dict[str, Any]) -> None:
        stop_process(worker["pid"])
        path = attacked.arena_path(worker)
        with closing(ArenaReader(path)) as arena:
            [slot] = [slot for slot in arena.slots() if slot.state is SlotState.LIVE]
        raw = bytearray(path.read_bytes())
        # Header and facts, the slot's neighbourhood, and the first pages: here and there a bit.
        used = 512 * 1024
        flip(raw, [rng.randrange(used) for _ in range(500 * seed)])
        with path.open("r+b") as file:
            file.write(raw[:used])
        assert slot.prompt_len > 0
        kill_worker(worker["pid"], Victim.TREE)

    wanted, answer = await harmed(attacked, http, scribble)
    if outcome_of(answer)[0] == "exact":
        assert answer.same_as(wanted)


async def test_when_all_processes_die_at_once_the_stream_is_still_finished(
    attacked: Sidecar, http: aiohttp.ClientSession
) -> None:
    await attacked.ready(http)

    async def kill_all(_: dict[str, Any]) -> None:
        workers, mover = await attacked.process.workers(http), (await attacked.status(http))["mover"]
        for worker in workers:
            kill_worker(worker["pid"], Victim.TREE)
        assert attacked.process.kill_holder()
        os.kill(mover["pid"], signal.SIGKILL)

    _, answer = await harmed(attacked, http, kill_all)
    assert outcome_of(answer) == ("recomputed", 1), "the KV has gone with the last who had it"
    await attacked.ready(http)


async def test_a_sidecar_whose_folder_was_removed_serves_on_and_is_exact_again(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1)
    folder = sidecar.process.state_dir

    async def remove(_: dict[str, Any]) -> None:
        await asyncio.to_thread(shutil.rmtree, folder)

    _, answer = await harmed(sidecar, http, remove)
    assert outcome_of(answer) == ("undisturbed", 0)

    async def is_repaired(_: aiohttp.ClientSession) -> bool:
        return (folder / "holder.sock").exists() and (folder / "mover.sock").exists()

    await until(is_repaired, http, limit_s=90)
    assert len(sidecar.holders()) == 1
    # Its arena went with the folder, and the next epoch has a new one.
    epoch = (await sidecar.worker(http))["epoch"]
    await sidecar.kill(http)

    async def is_back(http: aiohttp.ClientSession) -> bool:
        worker = await sidecar.worker(http)
        return bool(worker["epoch"] > epoch and worker["state"] == "ready")

    await until(is_back, http, limit_s=60)

    async def kill(worker: dict[str, Any]) -> None:
        kill_worker(worker["pid"], Victim.TREE)

    wanted, answer = await harmed(sidecar, http, kill)
    assert outcome_of(answer) == ("exact", 1)
    assert answer.same_as(wanted)
