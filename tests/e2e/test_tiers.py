"""Where KV comes from when there is no standby, only a disk, or nothing: each on a sidecar of its own."""

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.aim import kill_at, snapshot_exists
from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim
from support.sidecars import BLOCK_TOKENS, Sidecar, outcome_of, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7}


async def killed_at(
    sidecar: Sidecar, http: aiohttp.ClientSession, body: dict[str, Any], outputs: int, store: Path | None = None
) -> tuple[Answer, dict[str, Any]]:
    """The answer to a request whose worker is killed there, and what the sidecar says of its failover."""
    known = {s["session"] for s in await sidecar.sessions(http)}
    workers = await sidecar.process.workers(http)
    shooting = asyncio.to_thread(
        kill_at,
        [await sidecar.target(http, worker["name"]) for worker in workers],
        known,
        prompt_len=PROMPT_TOKENS,
        outputs=outputs,
        victim=Victim.TREE,
        may_shoot=lambda session: store is None or snapshot_exists(store, session),
    )
    answer, shot = await asyncio.gather(sidecar.stream(http, body), shooting)
    require_whole(answer)
    told = next(s for s in await sidecar.sessions(http) if s["session"] == shot.session)
    return answer, told["outcomes"][-1]


PROMPT_TOKENS = 12
# No pair of these letters is merged by the tiny tokenizer: one token each.
PROMPT = "x" * PROMPT_TOKENS


async def test_without_a_standby_it_goes_on_in_place(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1)
    body = {**SAMPLED, "prompt": PROMPT, "max_tokens": 80}
    wanted = await sidecar.stream(http, body)
    beside = asyncio.create_task(sidecar.stream(http, {**body, "prompt": "Me too, with a number: 23"}))
    cut = 2 * BLOCK_TOKENS - PROMPT_TOKENS
    answer, told = await killed_at(sidecar, http, body, cut)
    assert answer.same_as(wanted)
    assert (told["outcome"], told["tier"], told["lag"]) == ("exact", "in-place", 0)
    assert told["kv_tokens_loaded"] == PROMPT_TOKENS + told["cut"] - 1
    assert told["tokens_recomputed"] == 1
    assert answer.comments > 1, "a stream that waits for a restart gets comments"
    require_whole(await beside)
    assert outcome_of(await beside) == ("exact", 1)
    assert (await beside).same_as(await sidecar.stream(http, {**body, "prompt": "Me too, with a number: 23"}))


async def test_from_disk_it_goes_on_exactly_and_damaged_snapshots_are_not_used(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    settings = {"restore.tiers": "disk", "store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8}
    sidecar = await asyncio.to_thread(start, settings=settings, store=tmp_path)
    body = {**SAMPLED, "prompt": PROMPT, "max_tokens": 480}
    wanted = await sidecar.stream(http, body)
    answer, told = await killed_at(sidecar, http, body, 150, store=tmp_path)
    assert answer.same_as(wanted)
    assert (told["outcome"], told["tier"]) == ("exact", "disk")
    assert 0 < told["kv_tokens_loaded"] == PROMPT_TOKENS + told["cut"] - 1
    # What the snapshot lacks is decoded again, and compared with the journal.
    assert told["lag"] >= 0

    await sidecar.ready(http)
    damaging = asyncio.create_task(damage_chunks(tmp_path))
    answer, told = await killed_at(sidecar, http, body, 150, store=tmp_path)
    damaging.cancel()
    require_whole(answer)
    assert (told["outcome"], told["detail"]) == ("recomputed", "corrupt")
    # Nothing that the client had is said again or otherwise.
    assert answer.token_ids[:150] == wanted.token_ids[:150]
    assert len(answer.token_ids) == body["max_tokens"]
    assert sidecar.process.process is not None
    assert sidecar.process.process.poll() is None
    await sidecar.ready(http)


async def damage_chunks(store: Path) -> None:
    """Flip a bit in every chunk, again and again as new ones appear."""
    flipped: set[Path] = set()
    while True:
        for chunk in await asyncio.to_thread(lambda: list(store.glob("chunks/*/*"))):
            if chunk not in flipped:
                flipped.add(chunk)
                raw = bytearray(chunk.read_bytes())
                raw[len(raw) // 2] ^= 1
                chunk.write_bytes(raw)
        await asyncio.sleep(0.002)


async def test_a_full_arena_costs_snapshots_and_not_service(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1, settings={"arena.page_count": 16})
    bodies = [
        {**SAMPLED, "prompt": f"Number {i}: " + "and so on, " * 9, "max_tokens": 700 if i < 2 else 60}
        for i in range(10)
    ]
    answers = await asyncio.gather(*(sidecar.stream(http, body) for body in bodies))
    require_whole(*answers)
    assert [len(answer.token_ids) for answer in answers] == [body["max_tokens"] for body in bodies]
    worker = await sidecar.worker(http)
    assert worker["plugin"]["arena_full"] > 0
    assert worker["plugin"]["hook_errors"] == 0
    assert await sidecar.metric(http, "midstream_arena_full_total") > 0
    # The worker dies all the same, and what was not journaled is run again and compared.
    killed: list[int] = []

    async def kill(answer: Answer) -> None:
        if not killed and len(answer.token_ids) >= 20:
            killed.append(worker["pid"])
            await sidecar.kill(http)

    again = await asyncio.gather(
        sidecar.stream(http, bodies[0], kill), *(sidecar.stream(http, body) for body in bodies[1:])
    )
    require_whole(*again)
    assert killed
    assert any(outcome_of(answer)[1] for answer in again)
    for answer, before in zip(again, answers, strict=True):
        assert answer.same_as(before), answer.report


async def test_where_no_arena_can_be_had_it_serves_without_snapshots(
    start: Callable[..., Sidecar], command: list[str], http: aiohttp.ClientSession
) -> None:
    # Stands for a full file system: no file may become larger than 8 MB, and an arena is.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        small_pool = [*command, "--kv-cache-bytes", str(4 << 20)]
        sidecar = await asyncio.to_thread(start, command=small_pool, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await sidecar.metric(http, "midstream_arena_missing_total") == 1
    lines = [line for line in sidecar.process.last_lines().splitlines() if "event=no_arena" in line]
    assert len(lines) == 1
    assert "bytes cannot be had" in lines[0]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 150}
    wanted = await sidecar.stream(http, body)
    require_whole(wanted)
    killed: list[int] = []

    async def kill(answer: Answer) -> None:
        if not killed and len(answer.token_ids) >= 20:
            killed.append(1)
            await sidecar.kill(http)

    # Without a journal the request can only be run again; what comes out is compared with what the client has.
    answer = await sidecar.stream(http, body, kill)
    require_whole(answer)
    assert answer.same_as(wanted)
    assert outcome_of(answer) == ("recomputed", 1)
