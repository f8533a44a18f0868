"""Echo and prompt logprobs through the proxy: asked for by themselves, and part of an answer that survives."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from aiohttp import web

from midstream.session.errors import Refused
from support.answers import Answer, Voice
from support.proxying import Client, Got, proxied
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(8)
PROMPT_LOGPROBS = [None, {"5": {"logprob": -0.25, "rank": 1, "decoded_token": "x"}}]


class Echoing(ScriptedEngine):
    """Answers questions about prompts as vLLM does; `about` are fates of questions, used up one each."""

    def __init__(self, script: Script | None = None, *, about: tuple[Script, ...] = (), name: str = "w") -> None:
        super().__init__(ANSWER, script if script is not None else Script(), name=name)
        self.about = list(about)
        self.questions: list[dict[str, Any]] = []

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not (body.get("echo") or "prompt_logprobs" in body):
            return await super()._generate(request)
        self.questions.append(body)
        script = self.about.pop(0) if self.about else Script()
        await asyncio.sleep(script.gap_s)
        if script.drops_request:
            assert request.transport is not None
            request.transport.abort()
        if script.status != 200:
            return web.Response(status=script.status, body=script.body, content_type="application/json")
        return web.json_response(self._told(body))

    def _told(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            choice = {"index": 0, "message": {"content": "z"}, "finish_reason": "length"}
            return {"id": "q", "choices": [choice], "prompt_logprobs": PROMPT_LOGPROBS}
        prompt = body["prompt"][0] if isinstance(body["prompt"], list) else body["prompt"]
        choice = {"index": 0, "text": f"<{prompt}>", "logprobs": None, "finish_reason": "length"}
        return {"id": "q", "choices": [choice | {"prompt_logprobs": PROMPT_LOGPROBS}]}


def ask(client: Client, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "x", "echo": True, "max_tokens": 50, "seed": 1, **fields}
    return client.post("/v1/completions", body, X_Midstream_Policy="exact")


def texts(got: Got, stream: bool) -> list[str]:
    told: dict[int, str] = {}
    for chunk in got.chunks if stream else [got.json]:
        for choice in chunk.get("choices", ()):
            told[choice["index"]] = told.get(choice["index"], "") + choice["text"]
    return [told[index] for index in sorted(told)]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_comes_before_an_answer_that_goes_on_on_another_worker(stream: bool) -> None:
    coordinator = ScriptedCoordinator(Echoing(Script(at=3), name="a"), Echoing(name="b"))
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream)
    assert texts(got, stream) == ["<x>" + ANSWER.text()]
    assert len(coordinator.of("take_over")) == 1
    [question] = coordinator.engines[0].questions  # type: ignore[attr-defined]
    assert question == {"model": "tiny", "prompt": "x", "echo": True, "max_tokens": 0}
    assert coordinator.engines[1].questions == []  # type: ignore[attr-defined]
    assert all("echo" not in seen.body for engine in coordinator.engines for seen in engine.seen)
    assert b'"token_ids":[1' not in got.raw
    if stream:
        [prompt_ids] = [c["prompt_token_ids"] for c in got.choices if c.get("prompt_token_ids")]
        assert prompt_ids == list(ANSWER.prompt_ids)
    else:
        assert got.json["choices"][0]["prompt_logprobs"] == PROMPT_LOGPROBS
        assert got.json["choices"][0]["prompt_token_ids"] is None


@pytest.mark.parametrize("stream", [True, False])
async def test_each_prompt_is_asked_about_once_and_each_choice_begins_with_its_own(stream: bool) -> None:
    coordinator = ScriptedCoordinator(Echoing())
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream, prompt=["one", "two"], n=2)
    assert texts(got, stream) == [f"<{prompt}>" + ANSWER.text() for prompt in ("one", "one", "two", "two")]
    assert len(coordinator.engines[0].questions) == 2  # type: ignore[attr-defined]
    assert sorted(call[1] for call in coordinator.of("ended")) == ["finished"] * 6


async def test_a_chat_has_its_prompt_logprobs() -> None:
    coordinator = ScriptedCoordinator(Echoing())
    async with proxied(coordinator) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1, "n": 2}
        got = await client.post("/v1/chat/completions", body, X_Midstream_Policy="exact")
    assert got.json["prompt_logprobs"] == PROMPT_LOGPROBS
    assert [c["message"]["content"] for c in got.json["choices"]] == [ANSWER.text()] * 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_question_whose_worker_dies_is_asked_again(stream: bool) -> None:
    first = Echoing(about=(Script(drops_request=True),), name="a")
    coordinator = ScriptedCoordinator(first, Echoing(name="b"))
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream)
    assert texts(got, stream) == ["<x>" + ANSWER.text()]
    assert len(coordinator.engines[1].questions) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_engine_refuses_to_tell_is_the_answer_and_no_session_begins(stream: bool) -> None:
    body = b'{"error":{"message":"echo is not supported","code":400}}'
    coordinator = ScriptedCoordinator(Echoing(about=(Script(status=400, body=body),) * 2))
    async with proxied(coordinator) as client:
        got = await ask(client, stream=stream, prompt=["one", "two"])
    assert (got.status, got.raw) == (400, body)
    assert coordinator.engines[0].seen == []
    assert len(coordinator.of("ended")) == 2


async def test_an_answer_that_tells_nothing_is_a_clear_error() -> None:
    class Silent(Echoing):
        def _told(self, body: dict[str, Any]) -> dict[str, Any]:
            return {"choices": []}

    async with proxied(ScriptedCoordinator(Silent())) as client:
        got = await ask(client)
    assert got.status == 502
    assert "about the prompt" in got.json["error"]["message"]


@pytest.mark.parametrize(("n", "at"), [(1, 0), (1, 3), (2, 0), (2, 3)])
async def test_a_stream_that_has_no_room_for_its_prompt_ends_in_one_error(n: int, at: int) -> None:
    told = {"text_offset": [0], "token_logprobs": [None], "tokens": ["<x>"], "top_logprobs": [None]}
    # The first chunk's is no list at all; a later one's is a number that nobody can add to.
    broken = b'"logprobs":{"text_offset":%s}' % (b'"x"' if at == 0 else b"[" + b"9" * 5000 + b"]")

    class Roomless(Echoing):
        def _told(self, body: dict[str, Any]) -> dict[str, Any]:
            answer = super()._told(body)
            answer["choices"][0]["logprobs"] = told
            return answer

        def _voice(self, request: web.Request, body: dict[str, Any]) -> Voice:
            voice = super()._voice(request, body)
            fields = {field.name: getattr(voice, field.name) for field in dataclasses.fields(voice)}
            return Odd(**fields)

    class Odd(Voice):
        def tokens(self, start: int, end: int, *, first: bool, finish: str | None = None) -> bytes:
            raw = super().tokens(start, end, first=first, finish=finish)
            return raw.replace(b'"logprobs":null', broken) if start == at else raw

    coordinator = ScriptedCoordinator(Roomless(Script(gap_s=0.01)), Roomless(name="b"))
    async with proxied(coordinator) as client:
        got = await ask(client, stream=True, n=n)
    assert got.status == 200
    assert [chunk["error"]["code"] for chunk in got.chunks if "error" in chunk] == ["worker_lost"]
    assert "no room for its prompt" in got.chunks[-1]["error"]["message"]
    assert b"[DONE]" not in got.raw
    assert all(text in ("<x>" + ANSWER.text()) for text in texts(got, True) if at)
    assert coordinator.of("take_over") == [], "another engine's would have none either"
    endings = sorted(call[1] for call in coordinator.of("ended"))
    assert endings == sorted(["finished", "failed", *["cancelled"] * (n - 1)])


async def test_a_client_that_leaves_while_its_prompt_is_asked_about_gives_all_up() -> None:
    coordinator = ScriptedCoordinator(Echoing(about=(Script(gap_s=30),) * 2))
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(ask(client, prompt=["one", "two"]))
        while len(coordinator.engines[0].questions) < 2:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        while len(coordinator.of("ended")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert coordinator.of("ended") == [("ended", "cancelled")] * 2


async def test_a_question_that_nobody_takes_refuses_the_request() -> None:
    coordinator = ScriptedCoordinator(Echoing())
    coordinator.refusal = Refused("no_worker", "no worker is ready: wait")
    async with proxied(coordinator) as client:
        got = await ask(client)
    assert (got.status, got.json["error"]["code"]) == (503, "no_worker")


@pytest.mark.parametrize(
    "fields",
    [{"truncate_prompt_tokens": 5}, {"logprob_token_ids": [1]}, {"stream": True, "prompt_logprobs": 0, "echo": False}],
)
async def test_what_cannot_be_put_in_by_itself_is_refused_where_it_must_be_exact(fields: dict[str, Any]) -> None:
    async with proxied(ScriptedCoordinator(Echoing())) as client:
        got = await ask(client, **fields)
    assert got.status == 422
