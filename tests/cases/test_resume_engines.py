"""Cases from the field on real engines (r1, r4 to r8, r10 to r12, s1, w3): where a session is taken up again.

The same cases on both engines. A session is moved out of the live pool of a worker that was stopped at a given token,
which costs no start of an engine; the cases of kills are in tests/e2e and tests/adapters/vllm.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.harness import SidecarProcess
from midstream.sidecar.control_client import ControlClient
from support.field import EMBEDDED, SGLANG, VLLM, Manner
from support.moving import Ask, Body, Moved, Stage, pieces, require_equal, seam
from support.sidecars import MODEL, Sidecar
from support.told import Told
from support.vllm_rig import Rig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINES = [EMBEDDED, pytest.param(SGLANG, marks=pytest.mark.apart), pytest.param(VLLM, marks=pytest.mark.vllm)]
HALF = "\ufffd"
# Fractions depend a little on who else is in a batch; in these cases there are none but for the usage's numbers.
WITHIN = 1e-3
SECRETS = ("PELICAN", "THUNDER", "VIOLIN", "MAGENTA", "GRANITE", "LANTERN")
PERSON = {
    "type": "object",
    "properties": {"a": {"enum": [1]}, "b": {"type": "array", "items": {"enum": [2, 3]}, "minItems": 3, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=ENGINES, ids=lambda manner: manner.name)
def manner(request: pytest.FixtureRequest) -> Manner:
    """The engine."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def process(manner: Manner, request: pytest.FixtureRequest) -> Iterator[SidecarProcess]:
    """A sidecar with two of its workers."""
    if manner is EMBEDDED:
        started = Sidecar(request.getfixturevalue("command"))
        yield started.start().process
        started.stop()
    else:
        pair: Rig = request.getfixturevalue(f"{manner.name}_pair")
        yield pair.sidecar


@pytest_asyncio.fixture
async def stage(manner: Manner, process: SidecarProcess, http: aiohttp.ClientSession) -> AsyncIterator[Stage]:
    """The sidecar, ready."""
    async with ControlClient(process.state_dir) as control:
        model = MODEL if manner is EMBEDDED else "smollm2"
        stage = Stage(process, http, control, model, quiet=manner is EMBEDDED, core=manner.core)
        await stage.ready()
        yield stage


def asking(manner: Manner, **fields: Any) -> dict[str, Any]:
    """A greedy, streamed completion."""
    body = {"prompt": manner.wordy, "temperature": 0, "max_tokens": manner.tokens, "stream": True, "ignore_eos": True}
    return {**body, **fields}


async def same(
    stage: Stage, body: Body, at: int, wanted: Told | None = None, *, one_time: bool = True, **options: Any
) -> Told:
    """The answer of a session that is moved there: exact, and nobody can tell it from the undisturbed one."""
    wanted = wanted if wanted is not None else await stage.tell(body)
    moved = await stage.moved_at(body, at, **options)
    require_exact(moved)
    require_equal(moved.told, wanted, within=WITHIN, one_time=one_time)
    return moved.told


def require_exact(moved: Moved) -> None:
    assert moved.names == ["exact"] * len(moved.cuts), moved.outcomes
    for outcome in moved.came_to:
        assert outcome["lag"] == 0
        # Where the answer is complete already, no KV is needed any more.
        assert outcome["tokens_recomputed"] <= 1


async def test_r1_an_object_goes_on_within_itself(stage: Stage, manner: Manner) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PERSON}}
    body = {
        "messages": [{"role": "user", "content": "Give me an object."}],
        "temperature": 0, "max_tokens": 60, "stream": True, "response_format": schema,
    }  # fmt: skip
    if manner is EMBEDDED:
        told = await stage.tell(body)
        assert told.status == 400, "what it cannot keep to, it does not take"
        assert told.error["param"] == "response_format"
        return
    wanted, text, at = await stage.tell(body), "", 0
    for at, said in pieces(wanted):  # noqa: B007
        text += said
        if "," in text:
            break
    assert json.loads(wanted.text("content")).keys() == {"a", "b"}
    got = await same(stage, body, at, wanted, one_time=manner.has_one_time)
    assert got.text("content").startswith(text)
    assert got.text("content").count("{") == 1


async def test_r4_no_token_is_lost_or_said_twice_wherever_it_is_cut(stage: Stage, manner: Manner) -> None:
    edge, count = 8, 14
    body = asking(manner, prompt=[manner.filler_id] * (manner.block_tokens - edge), max_tokens=count)
    wanted = await stage.tell(body)
    assert len(wanted.ids) == count
    for at in (1, edge - 1, edge, edge + 1, count - 1):
        await same(stage, body, at, wanted)


async def test_r5_max_tokens_count_for_the_whole_session(stage: Stage, manner: Manner) -> None:
    body = asking(manner, max_tokens=20)
    got = await same(stage, body, 15)
    assert len(got.ids) == 20
    assert got.values["choices.0.finish_reason"] == "length"
    assert got.values["usage.completion_tokens"] == 20


@pytest.mark.parametrize("stream", [True, False])
async def test_r5_a_death_after_the_last_token_leaves_one_ending(stage: Stage, manner: Manner, stream: bool) -> None:
    body = asking(manner, max_tokens=15, stream=stream)
    # Its own ending may be on its way already, and then it is that one.
    got = await same(stage, body, 15, may_end=True)
    assert len(got.ids) == 15
    assert got.values["choices.0.finish_reason"] == "length"


async def test_r6_ids_decide_where_the_text_would_be_taken_apart_otherwise(stage: Stage, manner: Manner) -> None:
    one, other = manner.pair
    bias = {str(one): 60, str(other): 60}
    # Each letter becomes less likely with each time that it is said, so that they take turns.
    body = asking(manner, frequency_penalty=2.0, logit_bias=bias, max_tokens=24)
    wanted = await stage.tell(body)
    assert manner.merged not in wanted.ids
    at = next(i + 1 for i in range(6, 20) if wanted.ids[i : i + 2] == [one, other])
    got = await same(stage, body, at, wanted)
    assert got.text("text").count("th") >= 2


async def test_r7_ids_that_the_client_did_not_ask_for_are_not_in_its_answer(stage: Stage, manner: Manner) -> None:
    got = await same(stage, asking(manner, return_token_ids=False), 12)
    named = [(name, value) for name, value in got.values.items() if name.endswith("token_ids")]
    assert all(value is None for _, value in named), named


async def test_r8_an_emoji_that_spans_the_cut_comes_out_whole(stage: Stage, manner: Manner) -> None:
    body = asking(manner, **manner.emoji)
    wanted = await stage.tell(body)
    told = pieces(wanted)
    # A token that brought no text, and one after it that brought none either, or the character.
    at = next(count for (count, said), (_, before) in zip(told[10:], told[9:], strict=False) if not said and not before)
    got = await same(stage, body, at, wanted)
    assert HALF not in got.text("text")[:-1]
    assert any(ord(character) > 0x1F000 for character in got.text("text"))
    assert not got.text("text").startswith(body["prompt"])


async def test_r10_a_seed_goes_on(stage: Stage, manner: Manner) -> None:
    body = asking(manner, temperature=1, seed=7, max_tokens=64)
    await same(stage, body, 20)


async def test_r11_penalties_go_on(stage: Stage, manner: Manner) -> None:
    body = asking(manner, presence_penalty=2)
    got = await same(stage, body, 20)
    without = await stage.tell({**body, "presence_penalty": 0})
    assert without.ids[20:] != got.ids[20:], "the penalty decides what comes after the cut"


async def test_r11_min_tokens_go_on(stage: Stage, manner: Manner) -> None:
    body = asking(manner, **manner.ending, min_tokens=30, ignore_eos=False)
    got = await same(stage, body, 25)
    assert len(got.ids) == 31
    assert got.values["choices.0.finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_r12_a_stop_string_is_found_across_the_cut_and_never_leaks(
    stage: Stage, manner: Manner, stream: bool
) -> None:
    at, stop = seam(await stage.tell(asking(manner)), after=12)
    body = asking(manner, stop=[stop], stream=stream)
    got = await same(stage, body, at)
    assert got.values["choices.0.finish_reason"] == "stop"
    assert got.values[f"choices.0.{manner.stopped_by}"] == stop
    assert stop not in got.text("text")
    assert got.text("text"), "what came before it was said"


@pytest.mark.parametrize("usage", [True, False])
async def test_w3_usage_is_told_once_if_it_was_asked_for(stage: Stage, manner: Manner, usage: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": manner.wordy}], "temperature": 0, "max_tokens": 24, "stream": True,
        "stream_options": {"include_usage": usage},
    }  # fmt: skip
    got = await same(stage, body, 10, one_time=manner.has_one_time)
    told = [chunk for chunk in got.chunks if chunk.get("usage") is not None]
    assert len(told) == int(usage)
    for chunk in told:
        assert chunk["choices"] == []
        counted = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
        assert counted == (len(got.prompt_ids), len(got.ids))


async def test_s1_no_secret_is_in_anothers_answer(stage: Stage, manner: Manner) -> None:
    # The embedded engine is fast: its answers must not be over before they are moved.
    tokens = 160 if manner is EMBEDDED else 40
    bodies = [asking(manner, prompt=f"The password is {secret}. " * 6, max_tokens=tokens) for secret in SECRETS]
    wanted = await asyncio.gather(*(stage.tell(body) for body in bodies))
    # In shuffled order, all under way at once, and two more that nobody moves.
    cuts = random.Random(7).sample(range(10, 28, 3), len(bodies))
    load = [Ask(asking(manner, prompt=f"Count to {n}:", max_tokens=60)) for n in (7, 9)]
    moved = await stage.run(*load, *(Ask(body, (at,)) for body, at in zip(bodies, cuts, strict=True)))
    assert len({told.text("text") for told in wanted}) == len(SECRETS)
    for secret, plain, got in zip(SECRETS, wanted, moved[len(load) :], strict=True):
        require_exact(got)
        require_equal(got.told, plain, within=WITHIN)
        said = got.told.text("text").upper()
        assert not [other for other in SECRETS if other != secret and other in said]
