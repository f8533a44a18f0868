"""Clients of a whole sidecar that lose their connection, while its workers are killed, it drains, or it is killed."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.harness import Victim, kill_worker
from midstream.proxy.reattach_elsewhere import STREAMS_PATH
from support.reconnecting import connected, position_in, whole_events
from support.sidecars import COMPLETIONS, MODEL, Sidecar, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

KEEP_S = 30.0
BODY: dict[str, Any] = {"prompt": "Wherever I may be", "temperature": 0, "max_tokens": 400}
ASKED = {"model": MODEL, "stream": True, "return_token_ids": True, **BODY}
SETTINGS = {"proxy.reattach_s": KEEP_S}


async def cut(sidecar: Sidecar, size_bytes: int) -> tuple[str, bytes]:
    """A stream of which the client has so many bytes when it is killed: its name, and what of them is whole."""
    raw = json.dumps(ASKED).encode()
    async with connected(sidecar.url, "POST", COMPLETIONS, raw, {"X-Midstream-Report": "1"}) as client:
        await client.head()
        have = (await client.read(size_bytes))[:size_bytes]
        client.cut()
    return client.headers["x-midstream-stream"], whole_events(have)


async def rest(sidecar: Sidecar, token: str, position: int) -> bytes:
    """What follows, to the end; without the comments that bridge waits."""
    async with connected(sidecar.url, "GET", f"{STREAMS_PATH}{token}?from={position}") as again:
        await again.head()
        assert again.status == 200
        got = await again.read()
        assert again.ended
        return got.replace(b": waiting\n\n", b"")


def said(stream: bytes) -> tuple[str, list[int]]:
    """Text and ids of a stream."""
    chunks = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", stream)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["text"] for c in choices), [i for c in choices for i in c["token_ids"] or ()]


async def test_a_worker_dies_while_the_client_is_away_and_the_whole_is_what_it_would_have_been(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, settings=SETTINGS)
    wanted = await sidecar.stream(http, BODY)
    require_whole(wanted)
    token, have = await cut(sidecar, 9_000)
    kill_worker((await sidecar.process.serving(http))["pid"], Victim.TREE)
    # It comes back in the midst of that, is cut off once more, and comes back for all that is left.
    async with connected(sidecar.url, "GET", f"{STREAMS_PATH}{token}?from={position_in(have)}") as again:
        await again.head()
        more = whole_events(await again.read(3_000))
        again.cut()
    have += more
    have += await rest(sidecar, token, position_in(have))
    assert have.replace(b": waiting\n\n", b"") == await rest(sidecar, token, 0)
    assert said(have) == (wanted.text, wanted.token_ids)
    assert b": midstream outcome=exact takeovers=1 " in have
    # The name of a stream is its client's secret.
    async with http.get(sidecar.url + "/metrics") as answer:
        assert token not in await answer.text()
    assert token not in json.dumps(await sidecar.sessions(http))
    assert token not in sidecar.process.log.read_text()


async def test_a_sidecar_that_is_told_to_stop_waits_for_who_is_away_and_lets_them_come_back(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1, settings=SETTINGS)
    wanted = await sidecar.stream(http, BODY)
    token, have = await cut(sidecar, 9_000)
    os.kill(sidecar.pid, signal.SIGTERM)
    async with http.post(sidecar.url + COMPLETIONS, json=ASKED) as refused:
        assert refused.status == 503
    have += await rest(sidecar, token, position_in(have))
    assert said(have) == (wanted.text, wanted.token_ids)
    process = sidecar.process.process
    assert process is not None
    assert await asyncio.to_thread(process.wait, 90) == 0, sidecar.process.last_lines()


async def test_a_sidecar_that_was_started_anew_has_no_stream_of_the_one_before_and_says_so(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1, settings=SETTINGS)
    token, have = await cut(sidecar, 2_000)
    os.kill(sidecar.pid, signal.SIGKILL)
    assert sidecar.process.process is not None
    await asyncio.to_thread(sidecar.process.process.wait, 10)
    await sidecar.process.start(http)
    last = {"Last-Event-ID": f"{token}.{position_in(have)}"}
    async with http.post(sidecar.url + COMPLETIONS, json=ASKED, headers=last) as gone:
        assert (gone.status, (await gone.json())["error"]["code"]) == (410, "stream_gone")
    async with http.get(sidecar.url + STREAMS_PATH + token, headers=last) as gone:
        assert gone.status == 410
    assert await sidecar.sessions(http) == []


async def test_a_client_that_never_comes_back_frees_its_engine_when_its_time_is_over(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, workers=1, settings={"proxy.reattach_s": 0.5})
    await cut(sidecar, 2_000)
    assert (await sidecar.status(http))["sessions_open"] == 1
    await sidecar.ready(http)
    assert (await sidecar.sessions(http))[-1]["state"] == "cancelled"
