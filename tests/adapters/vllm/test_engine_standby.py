"""Two real vLLM workers: whatever a session asks of its engine goes on, on the standby, as if nothing had happened.

A start of vLLM is what costs time here, so many different sessions die in each kill.
"""

import json
import re
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.harness import Victim
from support.vllm_rig import BLOCK_TOKENS, CHAT, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STORY = "Write a long story about a dog named Max."
# Longer than what the workers prefill in one step, and than a block.
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
SECRETS = ("PELICAN", "THUNDER", "VIOLIN", "MAGENTA", "GRANITE", "LANTERN")


@pytest.fixture(scope="module")
def rig(vllm_pair: Rig) -> Rig:
    """A sidecar with two workers."""
    return vllm_pair


async def test_a_stream_is_what_the_engine_alone_would_have_sent(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    [url, *_] = [w["url"] for w in await rig.sidecar.workers(http)]
    for path, body in ((CHAT, chat(STORY, max_tokens=24)), (COMPLETIONS, completion(STORY, max_tokens=24))):
        for more in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
            request = {**body, **more}
            direct, proxied = await equal_bytes(http, url + path, rig.sidecar.url + path, request)
            assert proxied == direct


async def equal_bytes(
    http: aiohttp.ClientSession, direct: str, proxied: str, body: dict[str, Any]
) -> tuple[bytes, bytes]:
    """Both answers without ids and times. A busy engine now and then puts two tokens in a chunk: then once more."""
    pair = (b"", b"")
    for _ in range(5):
        pair = (await raw(http, direct, body), await raw(http, proxied, body))
        if pair[0].count(b"data:") == pair[1].count(b"data:"):
            break
    return pair


async def raw(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    """An answer's bytes, without what differs from request to request."""
    async with http.post(url, json=body) as response:
        assert response.status == 200
        return re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', await response.read())


async def test_grammar_penalties_and_half_characters_go_on_after_the_whole_tree_is_killed(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    emoji = chat("Draw rockets.", max_tokens=48, structured_outputs={"regex": "(😀|🚀|🌍){12}"})
    lengths: list[int] = []
    await rig.ask(http, Case(emoji), on_tokens=lambda a: lengths.append(len(a.text)))
    # Within a character: this token brought no text, the next one will not either.
    cut = next(i + 1 for i in range(10, len(lengths)) if lengths[i] == lengths[i - 1])
    cases = [
        Case(emoji, cut=cut),
        Case(chat("Describe a person as JSON.", max_tokens=80, response_format=json_schema(PERSON))),
        Case(chat(STORY, temperature=0.9, seed=5, top_p=0.95, **PENALTIES)),
        Case(completion(STORY), COMPLETIONS),
        Case(chat("Say hi.", min_tokens=40, presence_penalty=2, max_tokens=50)),
        Case(completion(LONG_PROMPT, temperature=1, seed=7), COMPLETIONS),
    ]
    wanted = await undisturbed(rig, http, cases)
    got = await rig.interrupted(http, cases, Victim.TREE)
    require_same(cases, wanted, got)
    assert set(json.loads(got[1].text)) == {"name", "age", "tags"}


async def test_a_stop_string_is_found_across_the_cut_after_the_core_is_killed(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    pieces: list[int] = []
    plain = await rig.ask(http, Case(chat(STORY)), on_tokens=lambda a: pieces.append(len(a.text)))
    # The worker dies between the two tokens that the stop string lies on.
    cut = next(i for i in range(20, len(pieces)) if is_first(plain.text, pieces[i - 1]))
    at = pieces[cut - 1]
    cases = [
        Case(chat(STORY, stop=[plain.text[at - 4 : at + 4]]), cut=cut - 3),
        Case(chat(STORY, temperature=0.8, seed=3), stream=False),
        Case(completion(STORY, max_tokens=cut + 8), COMPLETIONS, stream=False),
        Case(completion(LONG_PROMPT, temperature=1, seed=7), COMPLETIONS),
        Case(chat(STORY, max_tokens=cut + 1)),
        Case(chat("Say hi.", max_tokens=30, min_tokens=28, logprobs=True, top_logprobs=2)),
    ]
    wanted = await undisturbed(rig, http, cases)
    assert wanted[0].finish == "stop"
    got = await rig.interrupted(http, cases, Victim.CORE)
    require_same(cases, wanted, got)


def is_first(text: str, at: int) -> bool:
    """Whether the eight characters around `at` occur here and not before."""
    return text.find(text[at - 4 : at + 4]) == at - 4


async def test_secrets_stay_where_they_belong_after_the_front_end_is_killed(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [Case(completion(f"The password is {s}. " * 6, max_tokens=48), COMPLETIONS) for s in SECRETS]
    edge = chat(STORY + " Max lives in a small town by the sea." * 7, max_tokens=60)
    cases.append(Case(edge))
    wanted = await undisturbed(rig, http, cases)
    assert wanted[-1].usage is not None
    # With so many outputs the KV fills the first block to its last position.
    cut = BLOCK_TOKENS - wanted[-1].usage["prompt_tokens"] + 1
    assert 2 < cut < 50
    cases[-1] = Case(edge, cut=cut)
    got = await rig.interrupted(http, cases, Victim.ROOT, trigger=len(cases) - 1)
    require_same(cases, wanted, got)
    # What each says hangs on its own secret, and so would what it said after a look at another's.
    assert len({answer.text for answer in got}) == len(got)
    for secret, answer in zip(SECRETS, got, strict=False):
        assert not any(other in answer.text.upper() for other in SECRETS if other != secret)


async def test_what_a_resumed_session_brought_is_in_the_prefix_cache_once_it_decodes(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    unheard = completion("A cat that nobody has told a story about sits on the wall. " * 20, max_tokens=80)
    before = await prefix_hits(rig, http)
    await rig.interrupted(http, [Case(unheard, COMPLETIONS)], Victim.CORE)
    last = [s for s in await rig.sidecar.sessions(http) if s["outcomes"]][-1]
    [url] = [w["url"] for w in await rig.sidecar.workers(http) if w["name"] == last["worker"]]
    # Its own KV came from the dead worker, and was not looked up.
    found = (await prefix_hits(rig, http))[url]
    assert found == before[url]
    async with http.post(url + COMPLETIONS, json={**unheard, "max_tokens": 1}) as response:
        prompt_tokens = (await response.json())["usage"]["prompt_tokens"]
    full = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert full > BLOCK_TOKENS
    assert (await prefix_hits(rig, http))[url] == found + full


async def prefix_hits(rig: Rig, http: aiohttp.ClientSession) -> dict[str, float]:
    """Of each worker that answers: how many positions were found in its prefix cache so far."""
    hits = {}
    for worker in await rig.sidecar.workers(http):
        try:
            async with http.get(f"{worker['url']}/metrics") as response:
                text = await response.text()
        except aiohttp.ClientError:
            continue
        hits[worker["url"]] = sum(map(float, re.findall(r"(?m)^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text)))
    return hits


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's way to ask for an object."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
