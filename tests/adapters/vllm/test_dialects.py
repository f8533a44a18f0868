"""Two real vLLM workers behind the Responses and Messages APIs, and chats with hidden ids: they go on like all others.

A start of vLLM is what costs time here: all cases share two workers, that think and call tools.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.vllm_events import MESSAGES, RESPONSES, EventCase, Heard, hear, killed, moved
from support.vllm_rig import CHAT, Rig, before_its_end, shallow_model
from support.vllm_thinking import thinking_until

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Looks up the weather.", "parameters": SCHEMA, "strict": True}
RESPONSE_TOOLS = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
MESSAGE_TOOLS = {
    "tools": [{"name": "get_weather", "description": "Looks up the weather.", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "any"},
}
PROMPT = "Count to ten."
# The shallow model says to that: pecysicalim scarcealikhish completelytencepterirf Muir eventzerirf morblessercevir non
# transitve feel virtual cumve+not surprise surprise surpriseom indal ...
ENOUGH = "\u0120Muir"
STOP = ["whatever", " indal"]


def response(*cuts: int, **more: Any) -> EventCase:
    return EventCase(RESPONSES, {"input": PROMPT, "max_output_tokens": 50, "stream": True, **more}, cuts)


def message(*cuts: int, **more: Any) -> EventCase:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 50, "stream": True}
    return EventCase(MESSAGES, {**asked, **more}, cuts)


def hidden(*cuts: int, **more: Any) -> EventCase:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 50, "stream": True}
    return EventCase(CHAT, {**asked, "include_reasoning": False, **more}, cuts)


RESPONSE_SCHEMA = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
MESSAGE_SCHEMA = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "ignore_eos": True}
CASES = {
    "response": response(1, 8, 12, 13, 14, 15, 40),
    "response that calls a tool": response(5, 14, 22, 26, max_output_tokens=90, **RESPONSE_TOOLS),
    "response in a schema": response(10, 17, 25, **RESPONSE_SCHEMA),
    "response with a stop string": response(3, 16, stop=STOP),
    "sampled response": response(10, 30, **SAMPLED),
    "message": message(1, 8, 12, 13, 14, 15, 40),
    "message that calls a tool": message(5, 14, 22, 26, max_tokens=90, **MESSAGE_TOOLS),
    "message in a schema": message(10, 17, 25, **MESSAGE_SCHEMA),
    "message with a stop sequence": message(3, 12, stop_sequences=STOP),
    "hidden": hidden(1, 10, 14, 30, stream_options={"include_usage": True}),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A sidecar with two workers whose model thinks first, and may call tools."""
    model = thinking_until(ENOUGH, shallow_model(), tmp_path_factory.mktemp("models") / "thinking")
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    rig = Rig(*options, "--max-num-seqs", "16", workers=2, model=model)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@pytest_asyncio.fixture
async def plain(rig: Rig, http: aiohttp.ClientSession) -> AsyncIterator[dict[str, Heard]]:
    """What the answers are when nothing happens."""
    if not _plain:
        await rig.ready(http)
        for name, case in CASES.items():
            heard = await hear(http, rig.sidecar.url, case)
            assert heard.status == 200, heard.whole
            heard.require_in_order()
            _plain[name] = heard
    yield _plain


_plain: dict[str, Heard] = {}


def require_same(name: str, heard: Heard, plain: dict[str, Heard]) -> None:
    heard.require_in_order()
    assert heard.told() == plain[name].told(), name


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_that_is_moved_at_any_token_is_the_undisturbed_one(
    rig: Rig, http: aiohttp.ClientSession, plain: dict[str, Heard], name: str
) -> None:
    case = CASES[name]
    await rig.ready(http)
    answers = await asyncio.gather(*(moved(rig, http, case, cut) for cut in case.cuts))
    for cut, heard in zip(case.cuts, answers, strict=True):
        if "stop" in name and heard.told() != plain[name].told():
            # Behind a front end that lags, vLLM hands out two tokens as one. With characters held back for the sake of
            # stop strings its parser then ends the thoughts elsewhere, whether or not anything was moved.
            heard = await moved(rig, http, case, cut)
        require_same(name, heard, plain)
        # A second one where the old worker wrote the end before the new one had the KV. Without ids nobody knows then
        # whether its stop string was found in the replay alone.
        once_more = "exact|recomputed" if "stop" in name else "exact"
        wanted = rf"outcome=(exact takeovers=1|({once_more}) takeovers=2)\b"
        assert re.search(wanted, heard.report), (cut, heard.report)


async def test_all_of_them_go_on_after_one_kill(rig: Rig, http: aiohttp.ClientSession, plain: dict[str, Heard]) -> None:
    names = [name for name in CASES if "stop" not in name]
    heard = await killed(rig, http, [CASES[name] for name in names], deltas=2)
    for name, got in zip(names, heard, strict=True):
        require_same(name, got, plain)
    reports = {name: got.report for name, got in zip(names, heard, strict=True)}
    assert all("outcome=exact takeovers=1" in report for report in reports.values()), reports


async def test_unstreamed_answers_go_on_too(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    names = ("response", "response that calls a tool", "message", "message that calls a tool")
    wholes = [EventCase(CASES[name].path, {**CASES[name].body, "stream": False}) for name in names]
    plain = await asyncio.gather(*(hear(http, rig.sidecar.url, whole) for whole in wholes))
    for name, whole, undisturbed in zip(names, wholes, plain, strict=True):
        seen = {s["session"] for s in await rig.sidecar.sessions(http)}
        running = asyncio.create_task(hear(http, rig.sidecar.url, whole))
        await move_newest(rig, http, seen, 15)
        heard = await running
        assert heard.report == "outcome=exact", name
        assert heard.told() == undisturbed.told(), name


async def move_newest(rig: Rig, http: aiohttp.ClientSession, seen: set[str], cut: int) -> None:
    """Move the one session that was not there before: an unstreamed answer names its session only at its end."""
    async with asyncio.timeout(60), ControlClient(rig.sidecar.state_dir) as control:
        while not (new := {s["session"] for s in await rig.sidecar.sessions(http)} - seen):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await control.move(SessionId(new.pop()), at=cut)


async def test_a_message_samples_with_the_seed_of_its_marker(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    [url, *_] = [w["url"] for w in await rig.sidecar.workers(http)]
    told = []
    for session, seed in (("a" * 32, 7), ("b" * 32, 7), ("c" * 32, 8)):
        marker = {"midstream": {"v": 1, "session": session, "generation": 1, "seed": seed}}
        body = {**message().body, "temperature": 1.0, "kv_transfer_params": marker}
        told.append(json.dumps((await hear(http, url, EventCase(MESSAGES, body))).told()))
    assert told[0] == told[1] != told[2]


async def test_an_engine_that_is_told_to_stop_is_not_believed_to_have_finished(
    rig: Rig, http: aiohttp.ClientSession, plain: dict[str, Heard]
) -> None:
    """SIGTERM: the engine gives its requests up and ends their streams as if they were done."""
    await rig.ready(http)
    asked: list[int] = []

    def look(heard: Heard) -> None:
        if heard.text_count >= 2 and not asked:
            asked.append(1)
            running.append(asyncio.create_task(end()))

    async def end() -> None:
        worker = await rig.sidecar.serving(http)
        os.kill(worker["pid"], signal.SIGTERM)

    running: list[asyncio.Task[None]] = []

    async def ended(name: str) -> Heard:
        asked.clear()
        await rig.ready(http)
        heard = await hear(http, rig.sidecar.url, CASES[name], on_text=look)
        require_same(name, heard, plain)
        if "outcome=undisturbed" in heard.report:
            # On a busy machine an engine may come to the end before it hears of the signal.
            raise Refused("ended", f"{name}: its end overtook the signal")
        return heard

    for name in ("response", "message"):
        heard = await before_its_end(partial(ended, name))
        assert "takeovers=1" in heard.report
    await asyncio.gather(*running)
