"""Several choices and prompts in one request, on an engine that takes one of each: each survives its worker."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from midstream.session.arena import SlotState
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.several import Several, ask_several
from support.sidecars import MODEL, Sidecar, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

PROMPTS = ["The key lies under the third stone from", "My name is Grace, and nobody else's"]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "prompt": PROMPTS,
    "n": 2,
    "seed": 11,
    "temperature": 0.9,
    "max_tokens": 100,
    "logprobs": 1,
}
COUNT = 4


@pytest.fixture
def shared(kept: Callable[[], Sidecar]) -> Sidecar:
    """The sidecar that tests share; whether one is fresh matters to kills alone."""
    return kept()


@pytest.mark.parametrize("stream", [True, False])
async def test_several_choices_are_what_single_requests_with_their_seeds_are(
    shared: Sidecar, http: aiohttp.ClientSession, stream: bool
) -> None:
    await shared.ready(http)
    several = await ask_several(http, shared.url, {**ASKED, "stream": stream})
    alone = [
        await ask_several(http, shared.url, {**ASKED, "n": 1, "prompt": prompt, "seed": 11 + choice, "stream": stream})
        for prompt in PROMPTS
        for choice in range(2)
    ]
    assert several.done
    assert several.in_order == [single.choices[0] for single in alone]
    prompts = sum(single.counts[0] for single in alone[::2])
    assert several.counts == (prompts, COUNT * 100, prompts + COUNT * 100)
    assert several.report == ("undisturbed", 0)
    assert len(several.names) == 1
    assert len(set(several.sessions)) == COUNT
    told = [s for s in await shared.sessions(http) if s["session"] in several.sessions]
    assert len(told) == COUNT
    assert several.names == {f"cmpl-{parent}" for parent in {s["parent"] for s in told}}


@pytest.mark.parametrize("victims", [["worker-0"], ["worker-0", "worker-1"]])
async def test_choices_of_killed_workers_go_on_at_the_exact_token(
    sidecar: Sidecar, http: aiohttp.ClientSession, victims: list[str]
) -> None:
    await sidecar.ready(http)
    before = await ask_several(http, sidecar.url, {**ASKED, "stream": True})
    enough = asyncio.Event()

    def look(told: Several) -> None:
        if all(told.token_count(index) >= 20 for index in range(COUNT)):
            enough.set()

    asking = asyncio.create_task(ask_several(http, sidecar.url, {**ASKED, "stream": True}, look))
    await asyncio.wait_for(enough.wait(), 60)
    for victim in victims:
        await sidecar.kill(http, victim)
    got = await asking
    assert got.error is None
    assert got.done
    assert got.in_order == before.in_order
    assert got.counts == before.counts
    assert got.report[0] == "exact"
    # Choices that were through when their worker died had no pause, nor is a takeover that came to nothing one.
    assert got.report[1] >= 1


async def test_one_choice_can_be_moved_by_itself(shared: Sidecar, http: aiohttp.ClientSession) -> None:
    await shared.ready(http)
    body = {**ASKED, "stream": True}
    before = await ask_several(http, shared.url, body)
    moving: list[asyncio.Task[int]] = []

    def look(told: Several) -> None:
        if not moving and told.token_count(2) >= 10:
            moving.append(asyncio.create_task(control.move(SessionId(told.sessions[2]))))

    async with ControlClient(shared.process.state_dir) as control:
        got = await ask_several(http, shared.url, body, look)
        assert await moving[0] >= 10
    assert got.done
    assert got.in_order == before.in_order
    assert got.report == ("exact", 1)
    moved = [s["session"] for s in await shared.sessions(http) if s["session"] in got.sessions and s["outcomes"]]
    assert moved == [got.sessions[2]]


async def test_an_unstreamed_answer_of_several_choices_survives_too(
    shared: Sidecar, http: aiohttp.ClientSession
) -> None:
    await shared.ready(http)
    # With logprobs it would be made anew, because those of tokens that are lost cannot be made up.
    body = {**ASKED, "max_tokens": 200, "logprobs": None}
    before = await ask_several(http, shared.url, body)
    asking = asyncio.create_task(ask_several(http, shared.url, body))

    async def all_under_way(http: aiohttp.ClientSession) -> bool:
        worker = await shared.worker(http)
        reader = shared.arena(worker)
        try:
            journals = [len(reader.journal(slot)) for slot in reader.slots() if slot.state is SlotState.LIVE]
            return sum(length >= 20 for length in journals) >= 2
        finally:
            reader.close()

    await until(all_under_way, http)
    await shared.kill(http)
    got = await asking
    assert got.status == 200
    assert got.in_order == before.in_order
    assert got.counts == before.counts
    assert got.report == ("exact", 2)


async def test_a_prompt_that_is_too_long_refuses_the_whole_request(
    shared: Sidecar, http: aiohttp.ClientSession
) -> None:
    await shared.ready(http)
    got = await ask_several(http, shared.url, {**ASKED, "prompt": ["short", "long " * 40_000], "stream": True})
    assert got.status == 400
    assert "context" in got.error["message"]
    await shared.ready(http)
