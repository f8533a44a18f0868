"""Several choices and prompts on real vLLM workers: what vLLM itself would answer, and through the kill of a worker."""

import asyncio
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
def rig(vllm_pair: Rig) -> Rig:
    """A sidecar with two workers."""
    return vllm_pair


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


ECHOES: dict[str, dict[str, Any]] = {
    "echo": completion(PROMPTS[0], echo=True, **SEEDED),
    "echo and logprobs": completion(PROMPTS, n=2, echo=True, logprobs=2, **SEEDED),
    "echo and ids": completion(PROMPTS, echo=True, logprobs=0, return_token_ids=True, **SEEDED),
    "echo of ids": completion([504, 2365, 282], echo=True, logprobs=1, **SEEDED),
    "prompt logprobs": completion(PROMPTS, n=2, prompt_logprobs=2, **SEEDED),
    "echo and prompt logprobs": completion(PROMPTS[0], echo=True, logprobs=1, prompt_logprobs=3, **SEEDED),
    "chat": chat("Name three colours.", n=2, prompt_logprobs=1, **SEEDED),
}


def settled(told: Any) -> Any:
    """An answer without what differs from request to request, and numbers as far as they do not."""
    match told:
        case dict():
            return {name: settled(value) for name, value in told.items() if name not in ("id", "created")}
        case list():
            return [settled(value) for value in told]
        case float():
            return pytest.approx(told, abs=1e-3)
    return told


@pytest.mark.parametrize("name", ECHOES)
async def test_an_answer_has_of_its_prompt_what_the_engine_alone_would_have_sent(
    rig: Rig, http: aiohttp.ClientSession, name: str
) -> None:
    await rig.ready(http)
    [url, *_] = [w["url"] for w in await rig.sidecar.workers(http)]
    body = {"return_token_ids": False, **ECHOES[name]}
    direct = await ask_several(http, url, body)
    proxied = await ask_several(http, rig.sidecar.url, body, X_Midstream_Policy="exact")
    assert (direct.error, proxied.error) == (None, None)
    [alone], [through] = direct.raw, proxied.raw
    assert {name: value for name, value in through.items() if name not in ("id", "created")} == settled(alone)


@pytest.mark.parametrize("name", [name for name in ECHOES if name.startswith("echo")])
async def test_a_stream_begins_with_its_prompt_as_the_engines_own_does(
    rig: Rig, http: aiohttp.ClientSession, name: str
) -> None:
    await rig.ready(http)
    [url, *_] = [w["url"] for w in await rig.sidecar.workers(http)]
    # vLLM's own stream with echo, logprobs and n > 1 ends in an error, and prompt_logprobs are not for streams.
    body = {"return_token_ids": False, **ECHOES[name], "stream": True} | {"prompt_logprobs": None, "n": 1}
    direct = await ask_several(http, url, body)
    proxied = await ask_several(http, rig.sidecar.url, body, X_Midstream_Policy="exact")
    assert (direct.error, proxied.error) == (None, None)
    assert joined(proxied) == settled(joined(direct))
    assert set(shapes(proxied)) == set(shapes(direct))
    assert proxied.usage == direct.usage


def joined(told: Several) -> dict[int, dict[str, Any]]:
    """Each choice of a stream as if it had come in one chunk."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in told.raw:
        for choice in chunk["choices"]:
            so_far = whole.setdefault(choice["index"], {"text": "", "finish": None, "prompt_ids": [], "ids": []})
            so_far["text"] += choice["text"]
            so_far["finish"] = choice["finish_reason"] or so_far["finish"]
            so_far["prompt_ids"] += choice["prompt_token_ids"] or []
            so_far["ids"] += choice["token_ids"] or []
            for key, values in (choice["logprobs"] or {}).items():
                so_far.setdefault(key, []).extend(values)
    return whole


async def test_an_echoed_answer_survives_its_worker(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    body = completion(PROMPTS[0], echo=True, logprobs=1, **{**SEEDED, "max_tokens": 48}) | {"stream": True}
    before = await ask_several(http, rig.sidecar.url, body)
    killing: list[asyncio.Task[list[str]]] = []

    async def kill() -> list[str]:
        return kill_worker((await rig.sidecar.serving(http))["pid"], Victim.TREE)

    def look(told: Several) -> None:
        if not killing and told.token_count(0) >= 10:
            killing.append(asyncio.create_task(kill()))

    got = await ask_several(http, rig.sidecar.url, body, look)
    assert await killing[0]
    assert got.error is None
    assert joined(got) == settled(joined(before))
    assert got.report == ("exact", 1)
