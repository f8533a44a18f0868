"""Two real SGLang workers of the demo's model, of which one is killed in the midst of many answers, in both ways.

What each answer asks of its engine goes on in the other one as if nothing had happened.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.harness import Victim, kill_worker
from support.sglang_features import DRAWN, PENALTIES, PERSON, STORY
from support.sglang_rig import BLOCK_TOKENS, COMPACT, SglangRig
from support.vllm_rig import COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
SECRETS = ("PELICAN", "THUNDER", "VIOLIN", "MAGENTA")


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="serial"), pytest.param(True, id="overlapped", marks=pytest.mark.apart)],
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A sidecar with two workers, in either schedule."""
    if not request.param:
        yield request.getfixturevalue("sglang_pair")
        return
    rig = SglangRig("--chunked-prefill-size", "128", *COMPACT, workers=2, overlapped=True)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


async def test_whatever_was_asked_goes_on_after_the_scheduler_is_killed(rig: Rig, http: aiohttp.ClientSession) -> None:
    person = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PERSON}}
    cases = [
        Case(chat(STORY), cut=20),
        Case(chat("Describe a person as JSON.", max_tokens=80, response_format=person)),
        Case(chat(STORY, seed=5, **DRAWN, **PENALTIES)),
        Case(completion(LONG_PROMPT) | {"temperature": 1, "seed": 7}, COMPLETIONS),
        Case(chat("Say hi.", min_tokens=40, max_tokens=50)),
        Case(completion(STORY), COMPLETIONS, stream=False),
    ]
    wanted = await undisturbed(rig, http, cases)
    got = await rig.interrupted(http, cases, Victim.CORE)
    require_same(cases, wanted, got)
    assert set(json.loads(got[1].text)) == {"name", "age", "tags"}


async def test_secrets_stay_where_they_belong_after_the_whole_tree_is_killed(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [Case(completion(f"The password is {s}. " * 6, max_tokens=48), COMPLETIONS) for s in SECRETS]
    edge = completion(STORY * 4, max_tokens=60, ignore_eos=True)
    cases.append(Case(edge, COMPLETIONS))
    wanted = await undisturbed(rig, http, cases)
    assert wanted[-1].usage is not None
    # With so many outputs the KV fills its last block to the last position.
    cut = -wanted[-1].usage["prompt_tokens"] % BLOCK_TOKENS + 1
    assert 2 < cut < 50, cut
    cases[-1] = Case(edge, COMPLETIONS, cut=cut)
    got = await rig.interrupted(http, cases, Victim.TREE, trigger=len(cases) - 1)
    require_same(cases, wanted, got)
    assert len({answer.text for answer in got}) == len(got)
    for secret, answer in zip(SECRETS, got, strict=False):
        assert not any(other in answer.text.upper() for other in SECRETS if other != secret)


async def test_the_engines_own_api_goes_on_after_the_scheduler_is_killed(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"text": STORY, "sampling_params": params, "stream": True}
    wanted = await told(http, rig.sidecar.url, body, lambda _: None)
    killed: list[asyncio.Task[None]] = []

    async def kill() -> None:
        assert kill_worker((await rig.sidecar.serving(http))["pid"], Victim.CORE)

    def at_cut(event: Mapping[str, Any]) -> None:
        if not killed and event["meta_info"]["completion_tokens"] >= 15:
            killed.append(asyncio.create_task(kill()))

    got = await told(http, rig.sidecar.url, body, at_cut)
    await killed[0]
    assert [s["outcomes"][0]["outcome"] for s in await rig.sidecar.sessions(http) if s["outcomes"]][-1] == "exact"
    assert got == wanted


async def told(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], note: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """What the last event of a stream says, after each was seen to tell more than the one before."""
    last: dict[str, Any] = {"text": "", "output_ids": []}
    ended = False
    async with http.post(url + "/generate", json=dict(body)) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            assert not ended, line
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            assert event["text"].startswith(last["text"].removesuffix("\ufffd"))
            assert event["output_ids"][: len(last["output_ids"])] == last["output_ids"]
            assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
            note(event)
            last = event
    assert ended
    counts = ("finish_reason", "prompt_tokens", "completion_tokens")
    return {**{k: last[k] for k in ("text", "output_ids")}, **{k: last["meta_info"][k] for k in counts}}
