"""Several choices in one request, through the proxy and its engines: each is a session that survives its worker."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict

from midstream.proxy.coordinator import Reason, SessionFacts
from midstream.proxy.settings import ProxySettings
from midstream.proxy.waiting import Waiting
from midstream.session.errors import Refused
from support.answers import Answer, Voice
from support.proxying import Client, Got, proxied
from support.raw_engine import SSE_HEAD, RawEngine, chunked, read_request
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine, Seen


def answer_to(prompt: Any, seed: Any) -> Answer:
    """What the engines below say: other words and ids for each prompt and seed, so that nothing can be mixed up."""
    number = int(seed or 0) * 10 + len(str(prompt))
    words = tuple(f" {prompt}/{seed}:{i}".encode() for i in range(6 + number % 4))
    return Answer(words, first_id=1000 * number + 1, prompt_ids=tuple(range(3 + len(str(prompt)))))


class Choir(ScriptedEngine):
    """Answers by prompt and seed. `fates` are of single choices, by the seed that they ask with."""

    def __init__(self, fates: dict[int, Script] | None = None, *, name: str = "w", gap_s: float = 0.002) -> None:
        super().__init__(Answer.words(1), Script(gap_s=gap_s), name=name)
        self.fates = fates or {}

    def _voice(self, request: web.Request, body: dict[str, Any]) -> Voice:
        prompt = body.get("prompt", "x")
        answer = answer_to(prompt[0] if isinstance(prompt, list) else prompt, body.get("seed"))
        name = request.headers.get("X-Request-Id", "none")
        return replace(super()._voice(request, body), answer=answer, id=f"cmpl-{name}")

    async def _stream(
        self, request: web.Request, seen: Seen, voice: Voice, script: Script, marker: dict[str, Any]
    ) -> web.StreamResponse:
        return await super()._stream(request, seen, voice, self._script(seen.body, script), marker)

    async def _whole(
        self, request: web.Request, voice: Voice, script: Script, marker: dict[str, Any]
    ) -> web.StreamResponse:
        body = next(seen.body for seen in self.seen if seen.headers["X-Request-Id"] in voice.id)
        return await super()._whole(request, voice, self._script(body, script), marker)

    def _script(self, body: dict[str, Any], script: Script) -> Script:
        return self.fates.get(body.get("seed") or 0, script)


def choir(*fates: dict[int, Script]) -> ScriptedCoordinator:
    """A coordinator before engines with these fates, and a last one without any."""
    engines = [Choir(fate, name=name) for fate, name in zip((*fates, {}), "abcd", strict=False)]
    return ScriptedCoordinator(*engines)


def said(got: Got, stream: bool) -> list[tuple[str, list[int], str]]:
    """Text, ids and finish of each choice, in order."""
    told: dict[int, tuple[str, list[int], str]] = {}
    for chunk in got.chunks if stream else [got.json]:
        for choice in chunk["choices"]:
            text, ids, finish = told.get(choice["index"], ("", [], ""))
            piece = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            told[choice["index"]] = (
                text + piece,
                ids + (choice.get("token_ids") or []),
                finish + (choice["finish_reason"] or ""),
            )
    return [told[index] for index in sorted(told)]


def expected(prompts: Sequence[Any], n: int, seed: int) -> list[tuple[str, list[int], str]]:
    answers = [answer_to(prompt, seed + choice) for prompt in prompts for choice in range(n)]
    return [(a.text(), list(a.ids), "length") for a in answers]


def ask(client: Client, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": ["ab", "c"], "n": 2, "seed": 5, "return_token_ids": True, **fields}
    return client.post("/v1/completions", body, X_Midstream_Report="1")


@pytest.mark.parametrize("stream", [True, False])
async def test_each_choice_of_each_prompt_is_a_session_of_its_own(stream: bool) -> None:
    coordinator = choir()
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    assert got.status == 200
    assert said(got, stream) == expected(["ab", "c"], 2, 5)
    facts = [call[1] for call in coordinator.of("admit")]
    assert len({f.session for f in facts}) == 4
    assert len({f.parent for f in facts}) == 1
    assert all("n" not in f.body for f in facts)
    usage = got.usages if stream else [got.json["usage"]]
    outputs = sum(len(ids) for _, ids, _ in expected(["ab", "c"], 2, 5))
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in usage] == [(5 + 4, outputs)]
    assert got.headers["X-Midstream-Session"].split(", ") == [f.session for f in facts]
    ids = {chunk["id"] for chunk in got.chunks} if stream else {got.json["id"]}
    assert ids == {f"cmpl-{facts[0].parent}"}
    assert sorted(call[1] for call in coordinator.of("ended")) == ["finished"] * 4


async def test_a_chat_of_several_choices_has_a_role_for_each() -> None:
    coordinator = choir()
    async with proxied(coordinator) as client:
        got = await client.chat(n=3, seed=1, return_token_ids=True)
    assert said(got, True) == expected(["x"], 3, 1)
    roles = [c["index"] for chunk in got.chunks for c in chunk["choices"] if c["delta"].get("role")]
    assert sorted(roles) == [0, 1, 2]
    assert got.events.count(b"[DONE]") == 1
    assert got.events[-1] == b"[DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fate", [Fate.DIES, Fate.ABORTS])
async def test_a_choice_whose_worker_dies_goes_on_and_the_others_never_notice(stream: bool, fate: Fate) -> None:
    coordinator = choir({6: Script(at=3, ahead=1, fate=fate)})
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream)
    assert said(got, stream) == expected(["ab", "c"], 2, 5)
    assert len(coordinator.of("take_over")) == 2, "one choice of each of the two prompts asks with that seed"
    if stream:
        assert got.raw.rstrip().split(b"\n\n")[-1].startswith(b": midstream outcome=exact takeovers=2 gap_ms=")
    else:
        assert got.headers["X-Midstream-Takeovers"] == "2"
    assert sorted(call[1] for call in coordinator.of("ended")) == ["finished"] * 4


@pytest.mark.parametrize("stream", [True, False])
async def test_all_choices_lose_their_workers_twice_and_go_on(stream: bool) -> None:
    dies = {seed: Script(at=2 + seed - 5) for seed in (5, 6)}
    later = {seed: Script(at=4) for seed in (5, 6)}
    coordinator = choir(dies, later)
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream)
    assert said(got, stream) == expected(["ab", "c"], 2, 5)
    assert len(coordinator.of("take_over")) == 8


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_nobody_can_take_ends_all_in_one_error(stream: bool) -> None:
    coordinator = choir({6: Script(at=3)})
    coordinator.engines[0].scripts = [Script(gap_s=0.05)]
    coordinator.takeover_refusal = Refused("no_worker", "no worker is left: start one")
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream, prompt="ab")
        await asyncio.wait_for(coordinator.engines[0].seen[0].cancelled.wait(), 5)
    if stream:
        assert [chunk["error"]["code"] for chunk in got.chunks if "error" in chunk] == ["no_worker"]
        assert "error" in got.chunks[-1]
        assert b"[DONE]" not in got.raw
    else:
        assert got.status == 503
        assert got.json["error"]["code"] == "no_worker"
    assert sorted(call[1] for call in coordinator.of("ended")) == ["cancelled", "failed"]


async def test_a_choice_that_cleans_up_is_not_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Waiting.stop
    cleaned: list[int] = []

    async def slowly(waiting: Waiting) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task.cancelling():
            await asyncio.sleep(0.2)
            cleaned.append(task.cancelling())
        await stop(waiting)

    monkeypatch.setattr(Waiting, "stop", slowly)
    # One write says the error, and another one the report.
    coordinator = choir({6: Script(at=3)})
    coordinator.engines[0].scripts = [Script(gap_s=0.05)]
    coordinator.takeover_refusal = Refused("no_worker", "no worker is left: start one")
    async with proxied(coordinator) as client:
        got = await ask(client, stream=True, prompt="ab", n=3)
    assert [chunk["error"]["code"] for chunk in got.chunks if "error" in chunk] == ["no_worker"]
    assert b": midstream outcome=refused" in got.raw
    assert cleaned == [1, 1]
    assert sorted(call[1] for call in coordinator.of("ended")) == ["cancelled", "cancelled", "failed"]


async def test_a_client_that_leaves_while_choices_clean_up_does_not_disturb_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = Waiting.stop
    cleaned: list[int] = []
    cleans, gone = asyncio.Event(), asyncio.Event()

    async def slowly(waiting: Waiting) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task.cancelling():
            cleans.set()
            await gone.wait()
            await asyncio.sleep(0.2)
            cleaned.append(task.cancelling())
        await stop(waiting)

    monkeypatch.setattr(Waiting, "stop", slowly)
    coordinator = choir({6: Script(at=3)})
    coordinator.engines[0].scripts = [Script(gap_s=0.05)]
    coordinator.takeover_refusal = Refused("no_worker", "no worker is left: start one")
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(ask(client, stream=True, prompt="ab"))
        await asyncio.wait_for(cleans.wait(), 10)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        gone.set()
        while len(coordinator.of("ended")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert cleaned == [1]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_one_choice_is_the_answer_to_all(stream: bool) -> None:
    body = b'{"error":{"message":"prompt too long","code":400}}'

    class Refusing(Choir):
        async def _generate(self, request: web.Request) -> web.StreamResponse:
            if json.loads(await request.read())["prompt"] == ["long"]:
                await asyncio.sleep(0.2)  # the other one has begun long ago
                return web.Response(status=400, body=body, content_type="application/json")
            return await super()._generate(request)

    coordinator = ScriptedCoordinator(Refusing())
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream, prompt=["a", "long"], n=1)
    assert (got.status, got.raw) == (400, body)
    assert len(coordinator.of("ended")) == 2


async def test_an_engine_that_answers_one_choice_late_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("midstream.proxy.choices_run._BEGIN_S", 0.1)
    body = b'{"error":{"message":"prompt too long","code":400}}'
    heard = asyncio.Event()

    class Late(Choir):
        async def _generate(self, request: web.Request) -> web.StreamResponse:
            if json.loads(await request.read())["prompt"] == ["late"]:
                await heard.wait()
                return web.Response(status=400, body=body, content_type="application/json")
            return await super()._generate(request)

    coordinator = ScriptedCoordinator(Late())
    asked = {"model": "tiny", "prompt": ["a", "late"], "seed": 5, "return_token_ids": True, "stream": True}
    async with (
        proxied(coordinator) as client,
        client.session.post(client.url + "/v1/completions", json=asked) as answer,
    ):
        raw = await answer.content.readuntil(b'"finish_reason":"length"')
        heard.set()
        raw += await answer.content.read()
    before, error, after = raw.partition(b'data: {"error"')
    assert error
    assert said(Got(200, CIMultiDict(), before), True) == expected(["a"], 1, 5)
    assert b"prompt too long" in after
    assert b"[DONE]" not in raw


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_gives_up_every_choice(stream: bool) -> None:
    coordinator = ScriptedCoordinator(Choir(gap_s=30))
    engine = coordinator.engines[0]
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(ask(client, stream=stream))
        while len(engine.seen) < 4:  # noqa: ASYNC110 (the engine has no event for an arrival)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait_for(asyncio.gather(*(seen.cancelled.wait() for seen in engine.seen)), 5)
        while len(coordinator.of("ended")) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert coordinator.of("ended") == [("ended", "cancelled")] * 4


async def test_no_choice_is_read_faster_than_the_client_reads() -> None:
    event = b'data: {"id":"a","choices":[{"index":0,"text":"' + b"x" * 100_000 + b'"}]}\n\n'
    written_bytes = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written_bytes
        await read_request(reader)
        writer.write(SSE_HEAD)
        while written_bytes < 600_000_000:
            writer.write(chunked(event))
            await writer.drain()
            written_bytes += len(event)

    asked = {"prompt": "x", "stream": True, "n": 3}
    async with (
        proxied(ScriptedCoordinator(RawEngine(peer))) as client,
        client.session.post(client.url + "/v1/completions", json=asked) as got,
    ):
        await got.content.read(100)
        before = -1
        while before != written_bytes:
            before = written_bytes
            await asyncio.sleep(0.5)
        got.close()
    # What lies in between are the kernel's socket buffers and the bounded ones of both libraries, for each choice.
    assert before < 200_000_000


async def test_a_refusal_of_one_choice_at_the_door_refuses_all() -> None:
    class Full(ScriptedCoordinator):
        async def admit(self, facts: SessionFacts) -> Any:
            if len(self.of("admit")) == 2:
                self.refusal = Refused("no_worker", "no worker is ready: wait")
            return await super().admit(facts)

    coordinator = Full(Choir())
    async with proxied(coordinator) as client:
        got = await ask(client, stream=True)
    assert got.status == 503
    assert got.json["error"]["code"] == "no_worker"
    assert coordinator.of("ended") == [("ended", "cancelled")] * 2
    assert coordinator.engines[0].seen == []


async def test_choices_count_as_requests() -> None:
    coordinator = ScriptedCoordinator(Choir(gap_s=0.05))
    async with proxied(coordinator, ProxySettings(requests_max=5)) as client:
        gots = await asyncio.gather(*(ask(client, stream=True) for _ in range(2)))
        assert (await ask(client, stream=True)).status == 200, "what was counted is given back"
    assert sorted(got.status for got in gots) == [200, 503]


async def test_more_choices_than_the_bound_stay_one_request_or_are_refused_where_they_must_be_exact() -> None:
    coordinator = choir()
    body = {"model": "tiny", "prompt": "x", "n": 3, "seed": 0, "stream": True}
    async with proxied(coordinator, ProxySettings(choices_max=2)) as client:
        whole = await client.post("/v1/completions", body)
        refused = await client.post("/v1/completions", body, X_Midstream_Policy="exact")
    assert whole.status == 200
    assert coordinator.engines[0].seen[0].body["n"] == 3
    assert refused.status == 422
    assert "proxy.choices_max" in refused.json["error"]["message"]


async def test_bodies_of_all_choices_are_counted() -> None:
    settings = ProxySettings(bodies_bytes_max=100_000)
    async with proxied(choir(), settings) as client:
        refused = await ask(client, stream=True, prompt="x" * 40_000, n=3)
        assert refused.status == 503
        assert refused.json["error"]["code"] == "too_many_bytes"
        assert (await ask(client, stream=True, prompt="x" * 40_000, n=1)).status == 200
        assert (await ask(client, stream=True)).status == 200


@pytest.mark.parametrize(("prompts", "n"), [(["a", "a"], 1), ("a", 2)])
async def test_seeds_that_are_drawn_differ_for_every_choice(prompts: Any, n: int) -> None:
    coordinator = choir()
    async with proxied(coordinator) as client:
        got = await ask(client, stream=True, prompt=prompts, n=n, seed=None)
    seeds = [seen.body["seed"] for seen in coordinator.engines[0].seen]
    assert len(set(seeds)) == 2
    assert max(seeds) - min(seeds) == 1
    assert len({ids[0] for _, ids, _ in said(got, True)}) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("late", [0, 1])
async def test_the_seed_that_is_told_makes_the_same_answer_again(stream: bool, late: int) -> None:
    class Late(Choir):
        """Takes the request of one choice when it has taken the other's."""

        async def _generate(self, request: web.Request) -> web.StreamResponse:
            index = [facts.session for _, facts in coordinator.of("admit")].index(request.headers["X-Request-Id"])
            if index == late:
                while not self.seen:  # noqa: ASYNC110 (the engine has no event for an arrival)
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
            return await super()._generate(request)

    coordinator = ScriptedCoordinator(Late())
    async with proxied(coordinator) as client:
        first = await ask(client, stream=stream, prompt="ab", seed=None)
        told = int(first.headers["X-Midstream-Seed"])
    coordinator = choir()
    async with proxied(coordinator) as client:
        again = await ask(client, stream=stream, prompt="ab", seed=told)
    assert said(again, stream) == said(first, stream) == expected(["ab"], 2, told)
    assert "X-Midstream-Seed" not in again.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_no_seed_is_told_where_none_would_make_the_same_answer_again(stream: bool) -> None:
    async with proxied(choir()) as client:
        got = await ask(client, stream=stream, seed=None)
    assert got.status == 200
    assert "X-Midstream-Session" in got.headers
    assert "X-Midstream-Seed" not in got.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_a_move_in_the_middle_of_a_prefill_is_a_takeover_of_that_choice_alone(stream: bool) -> None:
    coordinator = choir({5: Script(at=0, fate=Fate.STALLS, gap_s=30)})
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(ask(client, stream=stream, prompt="ab"))
        while len(coordinator.placements) < 2 or len(coordinator.engines[0].seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        with suppress(asyncio.InvalidStateError):
            coordinator.placements[0].interrupted.set_result(Reason.PROCESS_DEATH)
        got = await asking
    assert said(got, stream) == expected(["ab"], 2, 5)
    assert len(coordinator.of("take_over")) == 1
