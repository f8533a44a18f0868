"""Responses and Messages through the proxy: sessions like all others, in their own words."""

import asyncio
import json
from typing import Any

import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from midstream.session.errors import Refused
from support.event_answers import RICH, EventAnswer, Item, messages_events, responses_events
from support.proxying import Client, Got, proxied
from support.scripted import Fate, Script, ScriptedCoordinator
from support.scripted_events import MESSAGES, RESPONSES, EventEngine

from .test_splice_events import bodies, joined, raw_of, same_everywhere

ASKED: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "tiny", "input": "x", "temperature": 0},
    MESSAGES: {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50, "temperature": 0},
}
both = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


async def ask(
    client: Client, path: str, *, stream: bool = True, headers: dict[str, str] | None = None, **more: Any
) -> Got:
    body = ASKED[path] | {"stream": stream} | more
    return await client.post(path, body, **{k.replace("-", "_"): v for k, v in (headers or {}).items()})


def undisturbed(path: str, answer: EventAnswer = RICH) -> list[dict[str, Any]]:
    told = messages_events(answer, "a") if path == MESSAGES else responses_events(answer, "a", seed_time=1700000097)
    return same_everywhere(joined([event.body for event in told]))


def pair(*scripts: Script, answer: EventAnswer = RICH) -> ScriptedCoordinator:
    return ScriptedCoordinator(EventEngine(answer, *scripts, name="a"), EventEngine(answer, name="b"))


def require_whole(got: Got, path: str, answer: EventAnswer = RICH) -> None:
    assert got.status == 200
    kept = b"".join(part + b"\n\n" for part in got.raw.split(b"\n\n") if part and not part.startswith(b":"))
    told = bodies(kept)
    assert same_everywhere(joined(told)) == undisturbed(path, answer)
    numbers = [body["sequence_number"] for body in told if "sequence_number" in body]
    assert numbers == list(range(len(numbers)))


@both
async def test_what_nothing_happens_to_is_passed_on_byte_for_byte(path: str) -> None:
    coordinator = pair()
    async with proxied(coordinator) as client:
        got = await ask(client, path)
    engine = coordinator.engines[0]
    assert isinstance(engine, EventEngine)
    assert got.raw == raw_of(engine.events(path))
    body = engine.seen[0].body
    assert "return_token_ids" not in body
    marker = body["kv_transfer_params"]["midstream"]
    assert (marker["generation"], "seed" in marker, "seed" in body) == (1, False, False)


@both
@pytest.mark.parametrize("fate", [Fate.DIES, Fate.ERRS, Fate.ENDS, Fate.ABORTS])
@pytest.mark.parametrize("at", [1, 6, 10, 13, RICH.count])
@pytest.mark.parametrize("ahead", [0, 2])
async def test_an_interrupted_stream_goes_on_where_it_was(path: str, fate: Fate, at: int, ahead: int) -> None:
    coordinator = pair(Script(at=at, fate=fate, ahead=ahead))
    async with proxied(coordinator) as client:
        got = await ask(client, path, headers={"X-Midstream-Report": "1"})
    require_whole(got, path)
    if fate is Fate.ABORTS and at == RICH.count:
        # There it was done already; whatever the engine says.
        return
    [(_, reason, delivered)] = coordinator.of("take_over")
    assert delivered == ()
    assert reason is {Fate.ABORTS: Reason.ABORT}.get(fate, reason)
    assert b": midstream outcome=exact takeovers=1" in got.raw


@both
async def test_a_seed_that_was_drawn_is_the_same_for_every_attempt(path: str) -> None:
    coordinator = pair(Script(at=4))
    async with proxied(coordinator) as client:
        await ask(client, path, temperature=1)
    first, second = (engine.seen[0].body for engine in coordinator.engines)
    if path == RESPONSES:
        assert first["seed"] == second["seed"] > 0
    else:
        markers = [body["kv_transfer_params"]["midstream"] for body in (first, second)]
        assert markers[0]["seed"] == markers[1]["seed"] > 0
        assert "seed" not in first


@both
async def test_a_stall_is_noticed_and_the_stream_goes_on(path: str) -> None:
    coordinator = pair(Script(at=6, fate=Fate.STALLS))
    settings = ProxySettings(stall=StallPolicy(floor_s=0.3, factor=2, ceiling_s=1))
    async with proxied(coordinator, settings) as client:
        got = await ask(client, path)
    require_whole(got, path)
    assert coordinator.of("take_over")[0][1] is Reason.STALL


@both
async def test_the_wait_for_kv_after_a_replay_is_no_stall(path: str) -> None:
    answer = EventAnswer.words(12)
    standby = EventEngine(answer, name="b")
    standby.kv_wait_s = 1.5
    coordinator = ScriptedCoordinator(EventEngine(answer, Script(at=6, ahead=2), name="a"), standby)
    settings = ProxySettings(stall=StallPolicy(floor_s=0.5, factor=20, ceiling_s=30))
    async with proxied(coordinator, settings) as client:
        got = await ask(client, path)
    require_whole(got, path, answer)
    assert len(coordinator.of("take_over")) == 1


@both
async def test_an_engine_that_writes_and_says_nothing_is_not_stalled(path: str) -> None:
    engine = EventEngine(RICH, Script(gap_s=0.25), name="a")
    engine.mute_from = 6
    coordinator = ScriptedCoordinator(engine, EventEngine(RICH, name="b"))
    settings = ProxySettings(stall=StallPolicy(floor_s=0.6, factor=1, ceiling_s=0.6))
    async with proxied(coordinator, settings) as client:
        got = await ask(client, path)
    require_whole(got, path)
    assert coordinator.of("take_over") == []


@both
async def test_a_worker_that_says_something_else_is_never_heard(path: str) -> None:
    other = EventAnswer((Item("reasoning", ("Let", " us", " think\n", "about", " 🦀")), *RICH.items[1:]))
    coordinator = ScriptedCoordinator(
        EventEngine(RICH, Script(at=6), name="a"), EventEngine(other, name="b"), EventEngine(RICH, name="c")
    )
    async with proxied(coordinator) as client:
        got = await ask(client, path)
    require_whole(got, path)
    assert len(coordinator.of("mismatched")) == 1


@both
async def test_nobody_left_is_one_error_in_the_apis_own_shape(path: str) -> None:
    coordinator = pair(Script(at=6))
    coordinator.takeover_refusal = Refused("no_worker", "nobody is left")
    async with proxied(coordinator) as client:
        got = await ask(client, path)
    last = bodies(got.raw)[-1]
    assert last["type"] == "error"
    if path == MESSAGES:
        assert last["error"] == {"type": "overloaded_error", "message": "nobody is left", "code": "no_worker"}
    else:
        assert last["sequence_number"] == bodies(got.raw)[-2]["sequence_number"] + 1
        assert (last["code"], last["message"], last["param"]) == ("no_worker", "nobody is left", None)
    assert got.raw.rpartition(b"event: ")[2].startswith(b"error\n")


@both
async def test_refusals_before_the_stream_have_the_apis_own_shape(path: str) -> None:
    coordinator = pair()
    coordinator.refusal = Refused("loading", "wait")
    async with proxied(coordinator) as client:
        for got in (await ask(client, path), await client.post(path, b"{"), await client.post(f"{path}/x", {})):
            error = json.loads(got.raw)
            assert got.status in (503, 400)
            assert ("type" in error) is (path == MESSAGES)
            assert error["error"]["message"]


@both
async def test_an_engines_own_refusal_is_the_clients(path: str) -> None:
    wrong = b'{"error":{"message":"no","code":400}}'
    coordinator = pair(Script(status=400, body=wrong))
    async with proxied(coordinator) as client:
        got = await ask(client, path)
    assert (got.status, got.raw) == (400, wrong)
    assert coordinator.of("take_over") == []


@both
@pytest.mark.parametrize("fate", [Fate.DIES, Fate.ABORTS])
async def test_an_unstreamed_answer_is_one_engines_own_and_whole(path: str, fate: Fate) -> None:
    coordinator = pair(Script(at=6, fate=fate))
    async with proxied(coordinator) as client:
        got = await ask(client, path, stream=False, headers={"X-Midstream-Report": "1"})
    told = json.loads(got.raw)
    assert told["id"].endswith("b")
    assert got.headers["X-Midstream-Takeovers"] == "1"
    texts = json.dumps(told.get("content") or told["output"], ensure_ascii=False)
    assert "about 🦀" in texts


async def test_what_only_one_engine_can_do_goes_to_it_as_it_is() -> None:
    coordinator = pair()
    async with proxied(coordinator) as client:
        background = await ask(client, RESPONSES, background=True)
        tokens = await client.post("/v1/messages/count_tokens", {"model": "tiny", "messages": []})
        stored = await ask(client, RESPONSES, previous_response_id="resp_1")
        off = await ask(client, MESSAGES, headers={"X-Midstream-Policy": "off"})
        exact = await ask(client, RESPONSES, store=True, headers={"X-Midstream-Policy": "exact"})
    engine = coordinator.engines[0]
    assert [got.status for got in (background, tokens, stored, off, exact)] == [200, 200, 200, 200, 422]
    assert json.loads(exact.raw)["error"]["code"] == "not_exact"
    assert len(coordinator.of("admit")) == 1
    assert all("kv_transfer_params" not in seen.body for seen in engine.seen)


@both
async def test_what_cannot_go_on_ends_with_one_error(path: str) -> None:
    media = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    if path == MESSAGES:
        media = {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
    coordinator = pair(Script(at=6))
    async with proxied(coordinator) as client:
        got = await ask(client, path, **media)
    assert coordinator.of("take_over") == []
    assert bodies(got.raw)[-1]["type"] == "error"
    assert b"multimodal" in got.raw


@both
async def test_exact_streams_wait_for_the_word_that_they_are(path: str) -> None:
    coordinator = pair(Script(at=6, ahead=1))
    asked, let = asyncio.Event(), asyncio.Event()

    async def settled(*_: object) -> None:
        asked.set()
        await let.wait()

    coordinator.settled = settled  # type: ignore[method-assign]
    async with proxied(coordinator) as client:
        running = asyncio.create_task(ask(client, path))
        await asyncio.wait_for(asked.wait(), 20)
        assert not running.done()
        assert coordinator.of("resumed") == []
        let.set()
        require_whole(await running, path)


@both
async def test_a_takeover_that_is_not_exact_enough_sends_nothing_of_it(path: str) -> None:
    coordinator = pair(Script(at=6, ahead=1))

    async def settled(*_: object) -> None:
        raise Refused("not_exact", "it would be recomputed")

    coordinator.settled = settled  # type: ignore[method-assign]
    async with proxied(coordinator) as client:
        got = await ask(client, path)
    told = bodies(got.raw)
    assert told[-1]["type"] == "error"
    wanted = messages_events(RICH, "a") if path == MESSAGES else responses_events(RICH, "a", seed_time=1700000097)
    assert told[:-1] == [event.body for event in wanted if event.after <= 6][: len(told) - 1]
