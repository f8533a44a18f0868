"""The strict reader of a stream: what one answer may say differently from chunk to chunk, and what it may not."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from midstream.loadtest.client import Answer, read_stream

PATH = "/v1/completions"


def chunk(text: str, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "length" if text == "c" else None}
    return {"id": "1", "object": "text_completion", "created": 100, "model": "m", "choices": [choice], **fields}


async def read(chunks: Sequence[dict[str, Any]]) -> Answer:
    """What the reader makes of a stream."""

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
        return await read_stream(http, str(server.make_url(PATH)), {"model": "m", "prompt": "x", "stream": True})


async def violations(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """What the reader finds wrong with a stream."""
    told = await read(chunks)
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


def completion_logprobs(text: str, other: float = -2.0) -> dict[str, Any]:
    tops = [{text: -0.1, "z": other}]
    return {"tokens": [text], "token_logprobs": [-0.1], "top_logprobs": tops, "text_offset": [0]}


def chat_logprobs(text: str, other: float = -2.0) -> dict[str, Any]:
    tops = [{"token": text, "logprob": -0.1, "bytes": [97]}, {"token": "z", "logprob": other, "bytes": [122]}]
    return {"content": [{"token": text, "logprob": -0.1, "bytes": [97], "top_logprobs": tops}]}


def with_logprobs(told: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The chunks of one answer, with these logprobs."""
    chunks = [chunk(text) for text in "abc"]
    for one, logprobs in zip(chunks, told, strict=True):
        one["choices"][0]["logprobs"] = logprobs
    return chunks


@pytest.mark.parametrize("form", [completion_logprobs, chat_logprobs])
async def test_answers_whose_alternatives_differ_are_not_the_same(form: Callable[..., dict[str, Any]]) -> None:
    one, again = [await read(with_logprobs([form(text) for text in "abc"])) for _ in range(2)]
    assert one.logprobs == [-0.1] * 3
    assert one.alternatives == [((text, -0.1), ("z", -2.0)) for text in "abc"]
    assert one.same_as(again)
    other = await read(with_logprobs([form("a"), form("b", other=-2.0001), form("c")]))
    assert other.logprobs == one.logprobs
    assert not one.same_as(other)
    fewer = await read(with_logprobs([form("a"), form("b"), {**form("c"), "top_logprobs": None, "content": []}]))
    assert not one.same_as(fewer)


async def test_alternatives_of_completions_are_in_no_order_and_may_be_missing() -> None:
    told = [completion_logprobs(text) for text in "abc"]
    turned = [{**one, "top_logprobs": [dict(reversed(one["top_logprobs"][0].items()))]} for one in told]
    assert (await read(with_logprobs(turned))).same_as(await read(with_logprobs(told)))
    # A first token has none where the prompt is told of, too; chats that ask for none have empty ones.
    none = await read(with_logprobs([{**told[0], "top_logprobs": [None]}, None, {**told[2], "top_logprobs": None}]))
    assert none.alternatives == [()]
    assert none.violations == []
