"""Clients that leave, do not read, or send what is no request: each costs itself and nobody else.

Each test runs on a sidecar of its own, and on one that all of them share.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from midstream.session.arena import SlotState
from support.sidecars import CHAT, COMPLETIONS, MODEL, Sidecar, outcome_of, require_whole, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

GROWTH_BYTES_MAX = 16 << 20
DEAF_TOKENS = 1900
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


class DeafClient:
    """A client with the smallest buffers that there are, which reads only when told to."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        parts = urlsplit(url)
        payload = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(60)
        self._socket.connect((parts.hostname, parts.port))
        self._socket.sendall(head.encode() + payload)

    def read_all(self) -> bytes:
        """Everything, to the end of the connection."""
        return b"".join(iter(lambda: self._socket.recv(1 << 16), b""))

    def close(self) -> None:
        """Leave."""
        self._socket.close()


async def test_a_client_that_does_not_read_stops_its_session_and_not_others(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    process = psutil.Process(sidecar.pid)
    require_whole(await sidecar.stream(http, {**LONG, "max_tokens": 40, "prompt": "Warm up"}))
    before = process.memory_info().rss
    # Each token brings a lot, so that the whole answer is more than all sockets and pipes on the way can take.
    body = {
        **LONG, "messages": [{"role": "user", "content": "Nobody listens"}],
        "max_tokens": DEAF_TOKENS, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    with (
        closing(DeafClient(sidecar.url, CHAT, body)) as one,
        closing(DeafClient(sidecar.url, CHAT, body)),
    ):
        lengths = [0, 0, 1]
        while lengths[-1] != lengths[-3]:
            assert len(lengths) < 100, f"no engine waits for its client: {lengths}"
            await asyncio.sleep(0.4)
            lengths.append(await journaled(sidecar, http))
        assert 0 < lengths[-1] < 2 * DEAF_TOKENS, "the engines wait for their clients"
        assert process.memory_info().rss - before < GROWTH_BYTES_MAX
        # Others are served meanwhile, and who reads at last gets everything.
        require_whole(await sidecar.stream(http, {"prompt": "And I?", "temperature": 0, "max_tokens": 30}))
        told = await asyncio.to_thread(one.read_all)
    assert b"data: [DONE]\n\n" in told
    assert told.count(b'"top_logprobs"') == DEAF_TOKENS


async def journaled(sidecar: Sidecar, http: aiohttp.ClientSession) -> int:
    """How many tokens of live sessions are in the arenas."""
    count = 0
    for worker in await sidecar.process.workers(http):
        with closing(sidecar.arena(worker)) as arena:
            count += sum(len(arena.journal(slot)) for slot in arena.slots() if slot.state is SlotState.LIVE)
    return count


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
