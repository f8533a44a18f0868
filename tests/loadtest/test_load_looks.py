"""What a load test finds out by looking: the engine's tokenizer and model, and what processes take."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from midstream.loadtest.load.resources import Resources
from midstream.loadtest.load.synthetic import prompt_of
from midstream.loadtest.load.tokens import learn_tokens, model_name
from midstream.session.errors import EngineError


def tokens_in(text: str) -> int:
    """A tokenizer that takes two tokens for a word of more than four letters, and begins with one of its own."""
    return 1 + sum(1 + (len(word) > 4) for word in text.split())


@asynccontextmanager
async def engine(*, tokenizes: bool, usage: bool = True, models: Any = "m") -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["max_tokens"] == 1
        return web.json_response({"usage": {"prompt_tokens": tokens_in(body["prompt"])}} if usage else {})

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"count": tokens_in((await request.json())["prompt"])})

    async def listed(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": models}]} if models else {"data": []})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", listed)])
    if tokenizes:
        app.add_routes([web.post("/tokenize", tokenize)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_prompts_are_as_long_as_wanted_with_and_without_a_tokenizer_to_ask(tokenizes: bool) -> None:
    async with engine(tokenizes=tokenizes) as url, aiohttp.ClientSession() as http:
        tokens = await learn_tokens(http, url, "m", 1)
        assert (tokens.count is not None) == tokenizes
        for wanted in (60, 1500):
            counted = tokens_in(await prompt_of(wanted, 3, 1, tokens))
            assert abs(counted - wanted) <= (1 if tokenizes else 0.1 * wanted)


async def test_an_engine_that_tells_neither_model_nor_usage_is_named(unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as http:
        async with engine(tokenizes=False, usage=False, models=None) as url:
            with pytest.raises(EngineError, match="no model is told"):
                await model_name(http, url)
            with pytest.raises(EngineError, match="no usage is told"):
                await learn_tokens(http, url, "m", 1)
        async with engine(tokenizes=True) as url:
            assert await model_name(http, url) == "m"
        with pytest.raises(EngineError, match="no model is told"):
            await model_name(http, f"http://127.0.0.1:{unused_tcp_port}")


async def test_processes_are_measured_from_the_first_look_on_and_may_vanish() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # noqa: ASYNC220
    gone = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220
    gone.wait()

    async def pids() -> dict[str, int]:
        return {"mover": busy.pid, "holder": gone.pid}

    resources = Resources(pids)
    try:
        process = psutil.Process(busy.pid)
        await resources.look()
        while process.cpu_times().user < 0.3:
            await resources.look()
    finally:
        busy.kill()
        busy.wait()
    await resources.look()
    told = resources.told(2.0)
    assert set(told) == {"mover"}
    assert 0.05 < told["mover"]["cpu_s"] < 5
    assert told["mover"]["cpu_percent"] == pytest.approx(50 * told["mover"]["cpu_s"], abs=1)
    assert told["mover"]["rss_mib_max"] > 1
