"""Running one request beside a sidecar that is a script: when it is interrupted, and what is believed of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from midstream.loadtest.client import Answer
from midstream.loadtest.harness import SidecarProcess
from midstream.loadtest.verify import runs
from midstream.loadtest.verify.cuts import Way
from midstream.loadtest.verify.prompts import COMPLETIONS, Prompt
from midstream.loadtest.verify.runs import Run, Runner
from midstream.session.errors import EngineError, Refused
from midstream.session.ids import SessionId

SESSION = SessionId("c" * 32)
PROMPT = Prompt("p", COMPLETIONS, {"prompt": "x", "temperature": 0, "max_tokens": 20})


class Script:
    """A sidecar: its HTTP side, its operator's side, and what was asked of both."""

    def __init__(self) -> None:
        self.url = ""
        self.log = Path("/dev/null")
        self.orders: list[tuple[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.sent = 0
        self.outcomes: list[dict[str, Any]] = []
        self.state = "finished"
        self.refuse: Refused | None = None
        self.no_snapshot = 0
        self.hang = False
        self.gone = False
        self.moved = asyncio.Event()

    # What the harness offers.

    async def sessions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return [{"session": SESSION, "state": self.state, "outcomes": self.outcomes}]

    def require_running(self) -> None:
        if self.gone:
            raise EngineError("the sidecar has ended")

    # What an operator's socket offers.

    async def move(self, session: SessionId, *, tier: str | None = None, at: int | None = None) -> int:
        self.orders.append((f"move {tier}", at))
        assert session == SESSION
        if self.refuse is not None:
            raise self.refuse
        self.outcomes = [{"outcome": "exact", "tier": tier, "cut": at, "lag": 1, "gap_ms": 3.0, "detail": ""}]
        self.moved.set()
        return (at or 0) + 1

    async def snapshot(self, session: SessionId) -> Mapping[str, Any]:
        self.orders.append(("snapshot", self.sent))
        if self.no_snapshot:
            self.no_snapshot -= 1
            raise Refused("no_snapshot", "no complete KV yet")
        return {}

    # What clients see.

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Midstream-Session": SESSION})
        await response.prepare(request)
        for number in range(20):
            if number == 19 and self.hang:
                await asyncio.sleep(30)
            self.sent = number + 1
            chunk = {
                "id": "a",
                "choices": [
                    {
                        "index": 0,
                        "text": f"{number} ",
                        "token_ids": [number],
                        "finish_reason": "length" if number == 19 else None,
                    }
                ],
            }
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
            await asyncio.sleep(0.002)
        usage = {"id": "a", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 20}}
        await response.write(b"data: " + msgspec.json.encode(usage) + b"\n\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def running(script: Script, *, isolate: bool = True) -> AsyncIterator[Runner]:
    app = web.Application()
    app.router.add_post(COMPLETIONS, script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as http:
            yield Runner(cast(SidecarProcess, script), http, script, "m", isolate=isolate)
    finally:
        await runner.cleanup()


async def interrupted(script: Script, way: Way = Way.MOVE, at: int = 15, lag: int = 4) -> Run:
    async with running(script) as runner:
        return await runner.interrupted(PROMPT, way, at, lag=lag, prompt_len=1)


async def test_a_move_is_asked_for_shortly_before_its_cut_and_what_the_sidecar_says_of_it_is_told() -> None:
    script = Script()
    run = await interrupted(script)
    assert script.orders == [("move held", 15)]
    assert 9 <= run.had <= 15
    assert (run.outcome, run.tier, run.journal, run.kept, run.lag) == ("exact", "held", 16, 16, 1)
    assert run.reading.tokens == tuple(range(20))
    assert run.reading.faults == ()
    assert script.headers[0]["X-Midstream-Report"] == "1"


async def test_from_disk_a_snapshot_is_taken_first_and_again_if_there_is_none_yet() -> None:
    script = Script()
    script.no_snapshot = 2
    run = await interrupted(script, Way.DISK)
    assert [order for order, _ in script.orders] == ["snapshot"] * 3 + ["move disk"]
    assert script.orders[-1] == ("move disk", 15)
    assert (run.outcome, run.tier) == ("exact", "disk")


async def test_a_cut_that_came_too_late_is_no_interruption() -> None:
    script = Script()
    script.refuse = Refused("ended", "the session ended")
    run = await interrupted(script)
    assert (run.outcome, run.journal, run.detail) == ("", 0, "the session ended")


async def test_what_a_sidecar_refuses_to_move_is_refused() -> None:
    script = Script()
    script.refuse = Refused("not_exact", "it has echo")
    run = await interrupted(script)
    assert (run.outcome, run.detail) == ("refused", "it has echo")


async def test_an_answer_that_never_ends_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ANSWER_S", 0.5)
    script = Script()
    script.hang = True
    async with running(script) as runner:
        reading = await runner.undisturbed(PROMPT)
    assert reading.faults == ("it had not ended after 0.5 s",)


async def test_a_sidecar_that_is_gone_is_not_taken_for_a_broken_answer() -> None:
    script = Script()
    async with running(script) as runner:
        script.url, script.gone = "http://127.0.0.1:1", True
        with pytest.raises(EngineError, match="has ended"):
            await runner.undisturbed(PROMPT)


async def test_an_order_ends_with_the_answer_that_it_was_given_for() -> None:
    script = Script()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def order(_: SessionId) -> int:
        begun.set()
        try:
            return await asyncio.sleep(600, 0)
        finally:
            ended.set()

    async with running(script) as runner:

        async def gone(prompt: Prompt, on_tokens: Any = None) -> Answer:
            on_tokens(Answer(session=SESSION, token_ids=[1]))
            await begun.wait()
            raise EngineError("the sidecar has ended")

        runner.answer = gone  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="has ended"):
            await runner.with_order(PROMPT, 1, order)
        assert ended.is_set()


async def test_each_run_has_a_salt_of_its_own_unless_the_cache_is_to_be_shared() -> None:
    script = Script()
    async with running(script) as runner:
        await runner.undisturbed(PROMPT)
        await runner.undisturbed(PROMPT)
    one, other = (body["cache_salt"] for body in script.bodies)
    assert one != other
    async with running(script, isolate=False) as runner:
        await runner.undisturbed(PROMPT)
    assert "cache_salt" not in script.bodies[-1]
    assert script.bodies[-1]["model"] == "m"
