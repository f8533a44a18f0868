"""Clients that leave, do not read, or send what is no request: each costs itself and nobody else.

Each test runs on a sidecar of its own, and on one that all of them share.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import aiohttp
import psutil
import pytest

from midstream.session.arena import SlotState
from support.sidecars import CHAT, COMPLETIONS, MODEL, Sidecar, outcome_of, require_whole, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

GROWTH_BYTES_MAX = 24 << 20
LONG: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 900, "stream": True}


async def test_a_client_that_leaves_frees_its_session_within_a_second(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    async with http.post(sidecar.url + COMPLETIONS, json={**LONG, "prompt": "I shall leave"}) as response:
        assert response.status == 200
        await response.content.readany()
        assert (await sidecar.status(http))["sessions_open"] == 1
        worker = await sidecar.process.serving(http)
        with closing(sidecar.arena(worker)) as arena:
            [slot] = [s for s in arena.slots() if s.state is SlotState.LIVE]
        response.close()

    async def is_free(http: aiohttp.ClientSession) -> bool:
        with closing(sidecar.arena(worker)) as arena:
            now = arena.refresh(slot)
        ended = now is None or now.state is SlotState.FINISHED
        return ended and (await sidecar.status(http))["sessions_open"] == 0

    assert await until(is_free, http) < 1.0
    assert (await sidecar.sessions(http))[-1]["state"] == "cancelled"


async def test_a_client_that_does_not_read_makes_the_sidecar_no_bigger(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    process = psutil.Process(sidecar.pid)
    require_whole(await sidecar.stream(http, {**LONG, "max_tokens": 40, "prompt": "Warm up"}))
    before = process.memory_info().rss
    url = sidecar.url + CHAT
    # What each token brings is made large, so that 900 of them are more than sockets and pipes can take.
    body = {
        **LONG, "messages": [{"role": "user", "content": "Nobody listens"}],
        "logprobs": True, "top_logprobs": 20, "return_token_ids": True,
    }  # fmt: skip
    async with aiohttp.ClientSession(read_bufsize=1024) as deaf:
        silent = [await deaf.post(url, json=body) for _ in range(3)]
        grown = 0
        for _ in range(40):
            await asyncio.sleep(0.05)
            grown = max(grown, process.memory_info().rss - before)
        # Others are served meanwhile, and who reads at last gets everything.
        beside = await sidecar.stream(http, {"prompt": "And I?", "temperature": 0, "max_tokens": 30})
        require_whole(beside)
        text = (await silent[0].read()).decode()
        for response in silent:
            response.close()
    assert grown < GROWTH_BYTES_MAX, f"{grown >> 20} MB"
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"token_ids"') >= 1


async def test_what_is_no_request_gets_a_clear_error_and_disturbs_nobody(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    body = {"prompt": "I am not disturbed", "temperature": 0, "max_tokens": 400}
    wanted = await sidecar.stream(http, body)
    running = asyncio.create_task(sidecar.stream(http, body))

    async def refused(**request: Any) -> tuple[int, dict[str, Any]]:
        async with http.post(sidecar.url + CHAT, **request) as response:
            return response.status, json.loads(await response.text())

    status, told = await refused(data=b'{"model": ', headers={"Content-Type": "application/json"})
    assert status == 400
    assert "JSON" in told["error"]["message"]
    status, told = await refused(json={"model": "gpt-17", "messages": [{"role": "user", "content": "?"}]})
    assert status == 404
    assert "gpt-17" in told["error"]["message"], "the engine's own error is passed on"

    async def hundred_mb() -> AsyncIterator[bytes]:
        yield b'{"model": "'
        for _ in range(100):
            yield b"x" * (1 << 20)

    before = psutil.Process(sidecar.pid).memory_info().rss
    try:
        status, told = await refused(data=hundred_mb(), headers={"Content-Type": "application/json"})
        assert status == 413
        assert "body_bytes_max" in told["error"]["message"]
    except aiohttp.ClientConnectionError:
        # Refused while it was still being sent: some of the answer may be lost with the connection.
        pass
    assert psutil.Process(sidecar.pid).memory_info().rss - before < 80 << 20
    answer = await running
    require_whole(answer)
    assert answer.same_as(wanted)
    assert outcome_of(answer) == ("undisturbed", 0)
