"""The load test's client: it sees through hostile servers, waits for nobody, and can begin an answer again."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from midstream.loadtest.client import Answer
from midstream.loadtest.load import drive
from midstream.loadtest.load.arrivals import Arrival, constant
from midstream.loadtest.load.drive import Driver, Pace
from midstream.loadtest.load.live import Live
from midstream.loadtest.load.records import Record, record_of
from midstream.loadtest.load.sender import Route, Sender
from midstream.loadtest.load.workload import COMPLETIONS, Ask
from support.virtual_time import VirtualLoop

IDS = list(range(100, 110))
GOOD = Answer(done=True, finish="length")
Script = Callable[[int, "Writer"], Awaitable[None]]


class Writer:
    """Writes an answer by hand, well or badly."""

    def __init__(self, response: web.StreamResponse, request: web.Request) -> None:
        self._response = response
        self.request = request

    async def raw(self, data: bytes) -> None:
        await self._response.write(data)

    async def chunk(self, **choice: Any) -> None:
        whole = {"id": "x", "choices": [{"index": 0, **choice}]}
        await self.raw(b"data: " + json.dumps(whole).encode() + b"\n\n")

    async def tokens(self, ids: list[int]) -> None:
        await self.chunk(text=" ".join(map(str, ids)) + " ", token_ids=ids)

    async def usage(self, count: int) -> None:
        told = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
        await self.raw(b"data: " + json.dumps(told).encode() + b"\n\n")

    async def end(self, count: int, *, finish: str = "length") -> None:
        await self.chunk(text="", finish_reason=finish)
        await self.usage(count)
        await self.raw(b"data: [DONE]\n\n")

    def cut(self) -> None:
        assert self.request.transport is not None
        self.request.transport.abort()


@asynccontextmanager
async def serving(script: Script, headers: dict[str, str] | None = None) -> AsyncIterator[str]:
    """A server whose n-th answer is written by `script(n, writer)`."""
    count = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        await response.prepare(request)
        await script(count, Writer(response, request))
        return response

    app = web.Application()
    app.add_routes([web.post(COMPLETIONS, handle)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def ask() -> Ask:
    return Ask(0, COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": len(IDS)}, len(IDS))


async def send(
    url: str, *, client_restarts: bool = False, answer_s: float = 20.0, silence_s: float = 10.0
) -> tuple[Live, Record]:
    live = Live(ask(), 0, time.perf_counter())
    sender = Sender(Route((url,), client_restarts=client_restarts), answer_s=answer_s, silence_s=silence_s)
    try:
        await sender.send(live)
    finally:
        await sender.close()
    told = record_of(
        live, strategy="kv", began_s=live.planned_s, controls=[IDS], fault_times_s=[], outcomes=[]
    )  # fmt: skip
    return live, told


# ---- one request


async def test_a_good_answer_is_a_success_and_its_session_is_known_before_its_first_token() -> None:
    async def script(_: int, writer: Writer) -> None:
        await writer.tokens(IDS[:4])
        await writer.tokens(IDS[4:])
        await writer.end(len(IDS))

    async with serving(script, {"X-Midstream-Session": "ab" * 16}) as url:
        live, told = await send(url)
    assert told.success, told.violations
    assert (told.verdict, told.session) == ("identical", "ab" * 16)
    assert [mark.count for mark in live.marks] == [4, 10]
    assert len(told.itls_ms) == 1


async def test_every_way_to_break_the_rules_is_seen() -> None:
    async def two_finishes(w: Writer) -> None:
        await w.tokens(IDS)
        await w.chunk(text="", finish_reason="length")
        await w.end(len(IDS))

    async def two_usages(w: Writer) -> None:
        await w.tokens(IDS)
        await w.chunk(text="", finish_reason="length")
        await w.usage(len(IDS))
        await w.usage(len(IDS))
        await w.raw(b"data: [DONE]\n\n")

    async def data_after_the_end(w: Writer) -> None:
        await w.tokens(IDS)
        await w.end(len(IDS))
        await w.tokens([1])

    async def two_roles(w: Writer) -> None:
        await w.chunk(delta={"role": "assistant"}, text="")
        await w.chunk(delta={"role": "assistant"}, text="", token_ids=IDS)
        await w.end(len(IDS))

    async def half_a_character(w: Writer) -> None:
        await w.chunk(text="\ufffd", token_ids=IDS[:5])
        await w.chunk(text="x", token_ids=IDS[5:])
        await w.end(len(IDS))

    async def no_end(w: Writer) -> None:
        await w.tokens(IDS)

    async def no_usage(w: Writer) -> None:
        await w.tokens(IDS)
        await w.chunk(text="", finish_reason="length")
        await w.raw(b"data: [DONE]\n\n")

    async def no_finish(w: Writer) -> None:
        await w.tokens(IDS)
        await w.usage(len(IDS))
        await w.raw(b"data: [DONE]\n\n")

    async def too_short(w: Writer) -> None:
        await w.tokens(IDS[:6])
        await w.end(6)

    async def no_json(w: Writer) -> None:
        await w.tokens(IDS)
        await w.raw(b"data: {\n\n")
        await w.end(len(IDS))

    for bad in (
        two_finishes, two_usages, data_after_the_end, two_roles, half_a_character, no_end, no_usage, no_finish,
        too_short, no_json,
    ):  # fmt: skip
        async with serving(lambda _, w, bad=bad: bad(w)) as url:  # type: ignore[misc]
            _, told = await send(url)
        assert not told.success, bad.__name__
        assert told.violations, bad.__name__


async def test_tokens_that_come_twice_are_repeated_and_those_that_never_come_are_lost() -> None:
    async def twice(_: int, writer: Writer) -> None:
        await writer.tokens(IDS[:5])
        await writer.tokens(IDS[3:])
        await writer.end(len(IDS))

    async def never(_: int, writer: Writer) -> None:
        await writer.tokens(IDS[:5])
        await writer.tokens(IDS[7:])
        await writer.end(len(IDS))

    async with serving(twice) as url:
        assert (await send(url))[1].repeated == 2
    async with serving(never) as url:
        assert (await send(url))[1].lost == 2


async def test_an_error_in_the_stream_is_told_as_it_was() -> None:
    async def script(_: int, writer: Writer) -> None:
        await writer.tokens(IDS[:3])
        await writer.raw(b'data: {"error": {"message": "no worker"}}\n\n')

    async with serving(script) as url:
        _, told = await send(url)
    assert not told.success
    assert "no worker" in told.error
    assert told.missing == 7


async def test_a_client_does_not_wait_for_ever() -> None:
    async def silent(_: int, writer: Writer) -> None:
        await writer.tokens(IDS[:3])
        await asyncio.sleep(60)

    async with serving(silent) as url:
        assert "connection broke" in (await send(url, silence_s=0.3))[1].violations[0]
        assert "no end within" in (await send(url, answer_s=0.3))[1].violations[0]


# ---- a client that begins again


async def test_a_client_that_restarts_has_its_gap_until_it_has_one_token_more_than_before() -> None:
    async def script(number: int, writer: Writer) -> None:
        await writer.tokens(IDS[:4])
        if number == 1:
            await asyncio.sleep(0.05)
            writer.cut()
            return
        await asyncio.sleep(0.3)
        await writer.tokens(IDS[4:])
        await writer.end(len(IDS))

    async with serving(script) as url:
        live, told = await send(url, client_restarts=True)
    assert told.success, told.violations
    assert (told.outcome, told.interruptions, told.verdict) == ("restarted", 1, "identical")
    assert live.tokens == IDS
    assert told.gaps_ms[0] >= 350


@pytest.mark.parametrize(("refusal", "tries"), [(503, 4), (429, 4), (422, 1)])
async def test_a_client_that_restarts_tries_until_somebody_answers_and_not_where_it_is_refused(
    refusal: int, tries: int
) -> None:
    attempts = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal attempts
        attempts += 1
        return web.json_response({"error": "no"}, status=refusal if attempts < 4 else 400)

    app = web.Application()
    app.add_routes([web.post(COMPLETIONS, handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        _, told = await send(f"http://127.0.0.1:{runner.addresses[0][1]}", client_restarts=True)
    finally:
        await runner.cleanup()
    assert (attempts, told.success, told.interruptions) == (tries, False, 0)


# ---- pace


def pace(requests: int | None = None, duration_s: float | None = None, limit_s: float = 30.0, most: int = 100) -> Pace:
    return Pace(requests, duration_s, limit_s, most)


async def test_arrivals_do_not_wait_for_answers() -> None:
    answered = asyncio.Event()

    async def send(live: Live) -> None:
        live.sent_s = time.perf_counter()
        if len(driver.lives) == 20:
            answered.set()
        await answered.wait()
        live.ended_s = time.perf_counter()

    driver = Driver([ask()], pace(requests=20), send, go_on=lambda: False)
    await driver.run(constant(100.0))
    assert len(driver.lives) == 20
    assert [round(live.planned_s - driver.began_s, 3) for live in driver.lives] == [i / 100 for i in range(20)]
    assert all(live.sent_s >= live.planned_s for live in driver.lives)


async def test_above_the_bound_arrivals_are_late_and_say_so() -> None:
    async def send(live: Live) -> None:
        live.sent_s = time.perf_counter()
        await asyncio.sleep(0.1)
        live.ended_s = time.perf_counter()

    driver = Driver([ask()], pace(requests=4, most=1), send, go_on=lambda: False)
    await driver.run(constant(1000.0))
    late = [live.sent_s - live.planned_s for live in driver.lives]
    assert late[3] >= 0.25
    assert late == sorted(late)


async def test_the_closed_loop_keeps_so_many_streams_and_no_more() -> None:
    most = now = 0

    async def send(live: Live) -> None:
        nonlocal most, now
        live.sent_s = time.perf_counter()
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        live.answer = GOOD
        live.ended_s = time.perf_counter()

    driver = Driver([ask()], pace(requests=30, most=3), send, go_on=lambda: False)
    await driver.run(None)
    assert most == 3
    assert len(driver.lives) == 30


async def test_the_closed_loop_does_not_race_where_everything_fails() -> None:
    async def send(live: Live) -> None:
        live.sent_s = live.ended_s = time.perf_counter()

    driver = Driver([ask()], pace(duration_s=1.0, most=1), send, go_on=lambda: False)
    await driver.run(None)
    assert 1 <= len(driver.lives) <= 6


async def test_load_goes_on_in_rounds_while_faults_are_to_come() -> None:
    async def send(live: Live) -> None:
        live.sent_s = live.ended_s = time.perf_counter()
        live.answer = GOOD
        await asyncio.sleep(0.001)

    driver = Driver([ask(), ask()], pace(requests=2, most=1), send, go_on=lambda: len(driver.lives) < 7)
    await driver.run(None)
    assert [live.round for live in driver.lives] == [0, 0, 1, 1, 2, 2, 3]


def test_a_pass_by_time_ends_by_time_though_the_next_arrival_is_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr(drive, "time", SimpleNamespace(perf_counter=loop.time))

    async def send(live: Live) -> None:
        live.sent_s = live.ended_s = loop.time()

    driver = Driver([ask()], pace(duration_s=20.0, limit_s=7200.0), send, go_on=lambda: False)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(driver.run(iter([Arrival(0.0), Arrival(3600.0)])))
        assert len(driver.lives) == 1
        assert 20.0 <= loop.time() - driver.began_s <= 20.0 + drive.LOOK_EVERY_S


async def test_what_is_not_over_when_the_pass_must_be_is_told_and_ended() -> None:
    async def send(live: Live) -> None:
        live.sent_s = time.perf_counter()
        await asyncio.sleep(3600)

    driver = Driver([ask()], pace(requests=2, limit_s=0.2), send, go_on=lambda: False)
    await driver.run(islice(constant(100.0), 2))
    assert all("the pass was over" in live.answer.violations[0] for live in driver.lives)
