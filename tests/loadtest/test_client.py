"""The strict reader of a stream: what one answer may say differently from chunk to chunk, and what it may not."""

import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from midstream.loadtest.client import read_stream

PATH = "/v1/completions"


def chunk(text: str, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "length" if text == "c" else None}
    return {"id": "1", "object": "text_completion", "created": 100, "model": "m", "choices": [choice], **fields}


async def violations(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """What the reader finds wrong with a stream."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in chunks:
            await response.write(b"data: " + json.dumps(one).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post(PATH, answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        told = await read_stream(http, str(server.make_url(PATH)), {"model": "m", "prompt": "x", "stream": True})
    assert told.text == "abc"
    return told.violations


@pytest.mark.parametrize("created", [(100, 100, 100), (100, 101, 103), (100, 101, 100)])
async def test_engines_may_stamp_the_answer_or_each_chunk(created: tuple[int, ...]) -> None:
    chunks = [chunk(text, created=at) for text, at in zip("abc", created, strict=True)]
    assert await violations(chunks) == []


async def test_no_chunk_is_from_before_the_first() -> None:
    chunks = [chunk(text, created=at) for text, at in zip("abc", (100, 99, 100), strict=True)]
    assert await violations(chunks) == ["created changed from 100 to 99"]


@pytest.mark.parametrize("name", ["id", "model", "object"])
async def test_its_names_stay(name: str) -> None:
    assert await violations([chunk("a"), chunk("b", **{name: "other"}), chunk("c")]) != []
