"""One real vLLM and no standby: the engine that is started again takes up its old pool, and its sessions in it."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from midstream.adapters.prompt import prompt_hash
from midstream.loadtest.client import read_stream
from midstream.loadtest.harness import Victim
from support.vllm_rig import BLOCK_TOKENS, CHAT, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(700)]

STORY = "Write a long story about a dog named Max."
# More than one block, so that those who begin with it share one.
SHARED = "Once upon a time there was a small town by the sea, where everybody knew everybody. " * 11
# Room for ten blocks: four sessions of three blocks each are two too many.
BLOCK_COUNT = 11


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A sidecar with one worker that has little room."""
    # Who waits for room on a busy machine is not stalled; a queue that never moves would be one all the same.
    settings = {"restore.load_timeout_s": 4, "proxy.stall_floor_s": 100}
    rig = Rig("--max-model-len", "512", "--num-gpu-blocks-override", str(BLOCK_COUNT), workers=1, settings=settings)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


async def test_sessions_that_share_blocks_all_go_on_in_the_old_pool(rig: Rig, http: aiohttp.ClientSession) -> None:
    shared = [completion(f"{SHARED}{name} was", max_tokens=40) for name in ("Anna", "Bruno")]
    cases = [
        Case(shared[0], COMPLETIONS, cut=12),
        Case(shared[1], COMPLETIONS),
        Case(chat(STORY, temperature=0.9, seed=5, presence_penalty=0.7)),
        Case(chat(STORY), stream=False),
    ]
    wanted = await undisturbed(rig, http, cases)
    assert wanted[0].usage is not None
    assert wanted[0].usage["prompt_tokens"] > BLOCK_TOKENS
    got = await rig.interrupted(http, cases, Victim.CORE)
    require_same(cases, wanted, got)
    [worker] = await rig.sidecar.workers(http)
    assert worker["adopted"]
    # What was taken over is in the prefix cache now, and as good as what the engine computes itself.
    require_same(cases, wanted, await undisturbed(rig, http, cases), takeovers=0)


async def test_a_session_that_was_preempted_never_gets_blocks_that_are_another_s(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [
        Case(completion(f"{SHARED[i:]}{name} was", max_tokens=100), COMPLETIONS)
        for i, name in enumerate(("Anna", "Bruno", "Carla", "Dario"))
    ]
    wanted = await undisturbed(rig, http, cases)
    assert wanted[0].usage is not None
    cut = 2 * BLOCK_TOKENS - wanted[0].usage["prompt_tokens"] + 8
    assert 10 < cut < 90
    cases[0] = Case(cases[0].body, COMPLETIONS, cut=cut)
    got = await rig.interrupted(http, cases, Victim.TREE, outcomes=("exact", "recomputed"))
    require_same(cases, wanted, got, outcomes=("exact", "recomputed"))
    # Whoever was preempted had no blocks when the engine died; it waited until there was room for it.
    outcomes = [answer.report.split("outcome=")[1].split()[0] for answer in got]
    assert outcomes == ["exact", "exact", "exact", "recomputed"]


def marked(body: dict[str, Any], marker: object) -> dict[str, Any]:
    """A request as nobody but the sidecar may send it."""
    return {**body, "kv_transfer_params": {"midstream": marker}}


def resume(outputs: Sequence[int], kv: str, **changes: object) -> dict[str, Any]:
    """A marker that takes a session up that this engine has never seen."""
    record = {"outputs": list(outputs), "kv": kv, "prompt_hash": "0" * 32, "finish": ""}
    return {"v": 1, "session": uuid.uuid4().hex, "generation": 2, "resume": {**record, **changes}}


async def test_a_marker_that_makes_no_sense_costs_nothing_but_the_marker(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    [worker] = await rig.sidecar.workers(http)
    url = worker["url"] + CHAT
    body = chat(STORY, max_tokens=8)
    wanted = await read_stream(http, url, body)
    nonsense = [
        "no object",
        ["midstream"],
        {"v": 99},
        {"v": 1, "session": "../../etc", "generation": 1},
        {**resume([1, 2], "held"), "generation": "seven"},
        resume([1, 2], "by-pigeon"),
        resume([-1], "none"),
        resume([1 << 31], "none"),
        resume([5] * 9, "none"),
        resume([5] * 5000, "none"),
        {**resume([5], "none"), "resume": [1, 2, 3]},
    ]
    for marker in nonsense:
        answer = await read_stream(http, url, marked(body, marker))
        assert answer.same_as(wanted), (marker, answer)
    [after] = await rig.sidecar.workers(http)
    assert after["plugin"]["hook_errors"] - worker["plugin"]["hook_errors"] == len(nonsense)
    assert after["pid"] == worker["pid"]


async def test_kv_that_nobody_brings_is_computed(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    [worker] = await rig.sidecar.workers(http)
    url = worker["url"] + CHAT
    body = chat(STORY, max_tokens=16)
    wanted = await read_stream(http, url, body)
    async with http.post(f"{worker['url']}/tokenize", json={"messages": body["messages"]}) as response:
        hashed = prompt_hash((await response.json())["tokens"])
    for kv, changes in (
        ("none", {}),
        ("held", {}),  # another prompt's hash
        ("held", {"prompt_hash": hashed}),  # no mover is asked: it times out
        ("in-place", {"prompt_hash": hashed}),  # nothing is reserved for it
    ):
        answer = await read_stream(http, url, marked(body, resume(wanted.token_ids[:9], kv, **changes)))
        assert answer.same_as(wanted), (kv, changes, answer)
    [after] = await rig.sidecar.workers(http)
    counted = {name: after["plugin"][name] - worker["plugin"][name] for name in after["plugin"]}
    assert counted["loads_timed_out"] == 1
    assert counted["reservations_lost"] == 1
    assert counted["hook_errors"] == 0


async def test_outputs_that_are_the_whole_answer_only_get_their_ending(rig: Rig, http: aiohttp.ClientSession) -> None:
    await rig.ready(http)
    [worker] = await rig.sidecar.workers(http)
    url = worker["url"] + CHAT
    body = chat(STORY, max_tokens=8)
    wanted = await read_stream(http, url, body)
    for changes in ({}, {"finish": "length"}):
        answer = await read_stream(http, url, marked(body, resume(wanted.token_ids, "none", **changes)))
        assert answer.same_as(wanted), answer


async def test_outputs_that_a_grammar_does_not_accept_fail_their_request_alone(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    await rig.ready(http)
    [worker] = await rig.sidecar.workers(http)
    url = worker["url"] + CHAT
    body = chat("Yes or no?", max_tokens=8, structured_outputs={"regex": "(yes|no)"})
    other = asyncio.create_task(read_stream(http, url, chat(STORY, max_tokens=30)))
    words = await read_stream(http, url, chat(STORY, max_tokens=4))
    refused = await read_stream(http, url, marked(body, resume(words.token_ids, "none")))
    assert refused.error is not None
    assert (await other).whole
    assert (await read_stream(http, url, body)).text in ("yes", "no")
