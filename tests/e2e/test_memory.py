"""Sessions whose pool is of no use go on exactly, from what was copied into memory of the host while they ran."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from midstream.loadtest.aim import Target, kill_at
from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim
from midstream.session.arena import ArenaReader
from midstream.session.held import HolderClient, map_pool
from midstream.session.ids import SessionId
from midstream.session.layout import PoolMeta
from midstream.sidecar.mover.client import MoverClient
from support.sidecars import BLOCK_TOKENS, Sidecar, outcome_of, require_whole, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PROMPT_TOKENS = 12
# No pair of these letters is merged by the tiny tokenizer: one token each.
BODY: dict[str, Any] = {
    "temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "prompt": "x" * PROMPT_TOKENS, "max_tokens": 300,
}  # fmt: skip
MEMORY = {"tier1.bytes": 64 << 20}
CUT = 100


async def killed(
    sidecar: Sidecar, http: aiohttp.ClientSession, before: Callable[[Target, SessionId], object]
) -> tuple[Answer, dict[str, Any]]:
    """The answer to a request whose worker is killed in its midst, stopped and tampered with before; and its takeover.

    Only when all blocks are kept that were full a few tokens earlier.
    """
    known = {s["session"] for s in await sidecar.sessions(http)}
    targets = [await sidecar.target(http, worker["name"]) for worker in await sidecar.process.workers(http)]

    def may_shoot(session: SessionId) -> bool:
        if kept_tokens(sidecar, session) < PROMPT_TOKENS + CUT - 2 * BLOCK_TOKENS:
            return False
        for target in targets:
            with closing(ArenaReader(target.arena)) as reader:
                if reader.find(session) is not None:
                    stop_tree(target.pid)
                    before(target, session)
        return True

    shooting = asyncio.to_thread(
        kill_at, targets, known, prompt_len=PROMPT_TOKENS, outputs=CUT, victim=Victim.TREE, may_shoot=may_shoot
    )
    answer, shot = await asyncio.gather(sidecar.stream(http, BODY), shooting)
    require_whole(answer)
    told = next(s for s in await sidecar.sessions(http) if s["session"] == shot.session)
    return answer, told["outcomes"][-1]


def kept_tokens(sidecar: Sidecar, session: SessionId) -> int:
    """How many positions the mover keeps; for a thread without a loop."""

    async def ask() -> int:
        client = MoverClient(sidecar.process.state_dir / "mover.sock")
        try:
            return (await client.kept(session)).kv_len
        finally:
            await client.close()

    return asyncio.run(ask())


def stop_tree(pid: int) -> None:
    """SIGSTOP, so that nothing of the engine reads what comes next."""
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        os.kill(process.pid, signal.SIGSTOP)


def scribble(folder: Path) -> Callable[[Target, SessionId], None]:
    """Change a bit in the second block of a session, where it lies in its worker's pool."""

    def change(target: Target, session: SessionId) -> None:
        with closing(ArenaReader(target.arena)) as reader:
            slot, facts = reader.find(session), reader.facts()
            assert slot is not None
            assert facts is not None
            block = reader.table(slot).blocks[1]
        fd, body = HolderClient(folder / "holder.sock").get(facts["pools"][0])
        try:
            meta = PoolMeta.from_json(body)
            with closing(map_pool(fd, meta.size_bytes)) as pool:
                pool[meta.layout.spans(block)[0][0]] ^= 1
        finally:
            os.close(fd)

    return change


def require_memory(answer: Answer, wanted: Answer, told: dict[str, Any], takeovers: int) -> None:
    """It went on exactly, with whole blocks from memory, and decoded what was missing."""
    assert answer.same_as(wanted), answer.report
    assert (told["outcome"], told["tier"]) == ("exact", "memory"), told
    assert outcome_of(answer) == ("exact", takeovers)
    assert told["kv_tokens_loaded"] == PROMPT_TOKENS + told["cut"] - 1
    assert told["kv_tokens_loaded"] % BLOCK_TOKENS == 0
    assert 0 <= told["lag"] <= 3 * BLOCK_TOKENS


async def test_a_damaged_block_of_the_held_pool_costs_a_session_nothing(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, settings=MEMORY)
    wanted = await sidecar.stream(http, BODY)
    answer, told = await killed(sidecar, http, scribble(sidecar.process.state_dir))
    assert answer.same_as(wanted), answer.report
    require_memory(answer, wanted, told, outcome_of(answer)[1])

    async def is_counted(http: aiohttp.ClientSession) -> bool:
        refused = await sidecar.metric(http, "midstream_restore_refused_total")
        return refused == 1 and await sidecar.metric(http, "midstream_mover_tier1_restores") == 1

    # An answer may be over before the first restore is known to have failed, or the mover was asked again.
    await until(is_counted, http)

    # In place nothing is copied, so there it is found before an engine is chosen.
    await sidecar.ready(http)
    alone = await asyncio.to_thread(start, workers=1, settings=MEMORY)
    answer, told = await killed(alone, http, scribble(alone.process.state_dir))
    require_memory(answer, wanted, told, 1)


async def test_it_is_there_still_after_the_mover_was_killed_too_and_free_when_the_session_is_over(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, settings={**MEMORY, "restore.tiers": "memory"})
    wanted = await sidecar.stream(http, BODY)

    def kill_mover(target: Target, session: SessionId) -> None:
        movers = [p for p in psutil.Process(sidecar.pid).children() if "midstream.sidecar.mover" in p.cmdline()]
        assert len(movers) == 1
        movers[0].kill()

    answer, told = await killed(sidecar, http, kill_mover)
    require_memory(answer, wanted, told, 1)

    async def is_free(http: aiohttp.ClientSession) -> bool:
        mover = (await sidecar.status(http))["mover"]
        return bool(mover.get("tier1_bytes")) and mover["tier1_blocks"] == 0

    await until(is_free, http)
