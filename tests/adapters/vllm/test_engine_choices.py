"""Several choices and prompts on real vLLM workers: what vLLM itself would answer, and through the kill of a worker."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.harness import Victim, kill_worker
from support.several import Several, ask_several
from support.vllm_rig import Rig, chat, completion

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 21, "top_p": 0.9, "max_tokens": 24}
PROMPTS = ["Once upon a time", "The capital of France is a city that"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A sidecar with two workers."""
    rig = Rig(workers=2)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


CASES: dict[str, dict[str, Any]] = {
    "choices": completion(PROMPTS[0], n=3, **SEEDED),
    "prompts": completion(PROMPTS, **SEEDED),
    "both": completion(PROMPTS, n=2, logprobs=1, **SEEDED),
    "ids": completion([[504, 2365, 282], [504, 3575]], n=2, **SEEDED),  # type: ignore[list-item]
    "chat": chat("Name three colours.", n=2, logprobs=True, top_logprobs=1, **SEEDED),
    "stops": completion(PROMPTS, n=2, stop=["a"], **SEEDED),
}


def shapes(told: Several) -> list[tuple[Any, ...]]:
    """What fields its chunks have, whatever order they came in."""
    found = []
    for chunk in told.raw:
        choices = [(choice["index"], *choice, *choice.get("delta", ())) for choice in chunk["choices"]]
        found.append((tuple(chunk), *choices))
    return sorted(found)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", CASES)
async def test_an_answer_with_several_choices_is_what_the_engine_alone_would_have_sent(
    rig: Rig, http: aiohttp.ClientSession, name: str, stream: bool
) -> None:
    await rig.ready(http)
    [url, *_] = [w["url"] for w in await rig.sidecar.workers(http)]
    body = {**CASES[name], "stream": stream}
    if stream:
        body["stream_options"] = {"continuous_usage_stats": True}
    direct, proxied = await ask_several(http, url, body), await ask_several(http, rig.sidecar.url, body)
    assert (direct.error, proxied.error) == (None, None)
    assert (direct.done, proxied.done) == (True, True)
    for alone, through in zip(direct.in_order, proxied.in_order, strict=True):
        assert (alone[0], alone[1], alone[3]) == (through[0], through[1], through[3])
        assert alone[2] == pytest.approx(through[2], abs=1e-3)
    assert len({choice[0] for choice in direct.in_order}) == len(direct.in_order), "choices that are alike show nothing"
    assert direct.usage == proxied.usage
    if not stream:
        assert shapes(direct) == shapes(proxied)
    else:
        # How many tokens come in a chunk is chance; which fields a chunk has is not.
        assert set(shapes(direct)) == set(shapes(proxied))
        assert {c["usage"]["prompt_tokens"] for c in direct.raw} == {c["usage"]["prompt_tokens"] for c in proxied.raw}


async def test_choices_of_a_killed_worker_go_on_while_the_others_stream(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    body = completion(PROMPTS, n=2, logprobs=1, **{**SEEDED, "max_tokens": 48}) | {"stream": True}
    before = await ask_several(http, rig.sidecar.url, body)
    enough = asyncio.Event()

    def look(told: Several) -> None:
        if all(told.token_count(index) >= 10 for index in range(4)):
            enough.set()

    asking = asyncio.create_task(ask_several(http, rig.sidecar.url, body, look))
    await asyncio.wait_for(enough.wait(), 120)
    kill_worker((await rig.sidecar.workers(http))[0]["pid"], Victim.TREE)
    got = await asking
    assert got.done, got.error
    for alone, through in zip(before.in_order, got.in_order, strict=True):
        assert (alone[0], alone[1], alone[3]) == (through[0], through[1], through[3])
    assert got.usage == before.usage
    assert got.report == ("exact", 2)
    await rig.ready(http)
