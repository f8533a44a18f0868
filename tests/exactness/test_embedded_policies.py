"""How exact a session has to be, on real engines: kept where it can be, and said where it cannot."""

import asyncio
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import aiohttp
import pytest

from midstream.session.arena import ArenaReader
from midstream.session.errors import Refused
from midstream.session.held import HolderClient, map_pool
from midstream.session.layout import PoolMeta
from midstream.session.ticket import worker_dir
from midstream.sidecar.control_client import ControlClient
from support.moving import COMPLETIONS, Moved, Stage, require_equal
from support.sidecars import BLOCK_TOKENS, MODEL, Sidecar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

CUT = 40
BODY: dict[str, Any] = {"prompt": "Nobody may tell " * 3, "temperature": 0.8, "seed": 5, "max_tokens": 90}
# Longer than the mover takes to notice that a block is full, also on a busy machine; meanwhile the worker is stopped.
SUMMED_S = 3.0


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"best_of": 2}, "best_of"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
async def test_what_cannot_be_exact_is_refused_before_any_engine_hears_of_it(
    stage: Stage, fields: dict[str, Any], word: str
) -> None:
    known = len(await stage.process.sessions(stage.http))
    refused = await stage.tell({**BODY, **fields}, X_Midstream_Policy="exact")
    assert (refused.status, refused.error["code"]) == (422, "not_exact")
    assert f"'{word}'" in refused.error["message"]
    assert len(await stage.process.sessions(stage.http)) == known
    # Under best-effort it is the engine's to say that it does not offer that.
    assert (await stage.tell({**BODY, **fields}, X_Midstream_Policy="best-effort")).status == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_what_can_be_exact_is_kept_so_where_that_is_demanded(stage: Stage, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    moved = await stage.moved(body, CUT, X_Midstream_Policy="exact")
    assert moved.names == ["exact"]
    require_equal(moved.told, await stage.tell(body))


async def test_off_is_no_session(stage: Stage) -> None:
    known = len(await stage.process.sessions(stage.http))
    told = await stage.tell({**BODY, "stream": True}, X_Midstream_Policy="off")
    assert told.done
    assert told.text("text")
    assert not [name for name in told.headers if name.startswith("X-Midstream")]
    assert not told.report
    assert len(await stage.process.sessions(stage.http)) == known


@pytest.mark.parametrize("stream", [True, False])
async def test_a_takeover_whose_kv_is_damaged_is_refused_where_exact_is_demanded(stage: Stage, stream: bool) -> None:
    moved = await damaged(stage, {**BODY, "stream": stream}, "exact")
    assert moved.told.error["code"] == "not_exact"
    assert "could only be recomputed" in moved.told.error["message"]
    assert moved.names == ["refused"]
    if stream:
        assert not moved.told.done
        assert moved.told.report == "midstream outcome=refused"
        # What the client had before the cut was good.
        assert moved.told.ids == (await stage.tell(BODY)).ids[: len(moved.told.ids)]
    else:
        assert moved.told.status == 422


@pytest.mark.parametrize("stream", [True, False])
async def test_a_takeover_whose_kv_is_damaged_is_recomputed_under_best_effort(stage: Stage, stream: bool) -> None:
    moved = await damaged(stage, {**BODY, "stream": stream}, "best-effort")
    assert (moved.told.status, moved.told.done, moved.told.error) == (200, True, None)
    assert [(o["outcome"], o["detail"]) for o in moved.outcomes] == [("recomputed", "checksum")]
    wanted = await stage.tell(BODY)
    assert moved.told.ids[:CUT] == wanted.ids[:CUT]
    assert len(moved.told.ids) == len(wanted.ids)


async def damaged(stage: Stage, body: dict[str, Any], policy: str) -> Moved:
    """The answer to a request that is moved when a bit of its KV has changed since that was summed."""

    async def harm(worker: dict[str, Any], session: str) -> None:
        await asyncio.sleep(SUMMED_S)
        path = worker_dir(stage.process.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
        with closing(ArenaReader(path)) as arena:
            slot = next(slot for slot in arena.slots() if slot.session == session)
            block = arena.table(slot).blocks[CUT // BLOCK_TOKENS - 1]
        fd, told = HolderClient(stage.process.state_dir / "holder.sock").get(worker["pools"][0])
        meta = PoolMeta.from_json(told)
        with closing(map_pool(fd, meta.size_bytes)) as pool:
            os.close(fd)
            for start, _ in meta.layout.spans(block):
                pool[start] ^= 0x10

    return await stage.moved_at(body, CUT, harm=harm, X_Midstream_Policy=policy)


async def test_where_kv_may_not_be_restored_exact_is_refused_and_best_effort_says_recomputed(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    settings = {"restore.tiers": "none", "proxy.policy": "exact"}
    sidecar = await asyncio.to_thread(start, settings=settings)
    async with ControlClient(sidecar.process.state_dir) as control:
        stage = Stage(sidecar.process, http, control, MODEL, quiet=True)
        # The policy of the deployment: the order is refused, and the answer goes on where it is.
        with pytest.raises(Refused, match="no worker that is ready could use its KV") as refused:
            await stage.moved({**BODY, "stream": True}, CUT)
        # The client's own.
        moved = await stage.moved({**BODY, "stream": True}, CUT, X_Midstream_Policy="best-effort")
        wanted = await stage.tell(BODY)
    assert refused.value.reason == "not_exact"
    assert moved.names == ["recomputed"]
    assert moved.told.report.startswith("midstream outcome=recomputed takeovers=1 ")
    assert moved.told.ids[:CUT] == wanted.ids[:CUT]
    assert len(moved.told.ids) == len(wanted.ids)


async def test_a_policy_that_there_is_not_is_named(stage: Stage) -> None:
    async with stage.http.post(
        stage.process.url + COMPLETIONS, json={"model": MODEL, **BODY}, headers={"X-Midstream-Policy": "perfect"}
    ) as answer:
        assert answer.status == 400
        assert "'perfect'" in await answer.text()
