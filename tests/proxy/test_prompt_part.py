"""What of an answer belongs to its prompt: asked for by itself, and put where the engine puts it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.proxy.dialects.hiding import Hiding
from midstream.proxy.eligible import why_not_resumable
from midstream.proxy.prompt_part import NoPromptPart, PromptPart, StreamGraft, is_asked_for, question, rest
from midstream.proxy.sse import BUFFER_BYTES_MAX
from midstream.session.errors import EngineError

TOKENS = ["Once", " up", "on", " é"]
OUTPUT = [" a", " 🎉", " time"]


def logprobs(tokens: list[str], *, start: int = 0, first: float | None = -1.5) -> dict[str, Any]:
    """The log probabilities of some tokens, as vLLM writes them."""
    offsets = [start + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    values = [first, *(-1e-05 * (i + 1) for i in range(1, len(tokens)))]
    top = [None if value is None else {token: value} for token, value in zip(tokens, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}


def whole(text: str, told: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": told, "finish_reason": "length", "stop_reason": None}
    choice |= {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None} | more
    return {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": 4}}


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def chunk(text: str, told: dict[str, Any] | None, **more: Any) -> bytes:
    return b"data: " + encoded(whole(text, told, **more)) + b"\n\n"


PROMPT_LOGPROBS = [None, {"5": {"logprob": -0.25, "rank": 1, "decoded_token": " up"}}]
ABOUT_PROMPT = whole("".join(TOKENS), logprobs(TOKENS, first=None), prompt_logprobs=PROMPT_LOGPROBS)


@pytest.mark.parametrize(
    ("body", "chat", "asked"),
    [
        ({}, False, False),
        ({"echo": False, "prompt_logprobs": None}, False, False),
        ({"echo": True}, False, True),
        ({"echo": True, "stream": True}, False, True),
        ({"prompt_logprobs": 0}, False, True),
        ({"prompt_logprobs": -1}, True, True),
        ({"prompt_logprobs": 0, "stream": True}, False, False),
        ({"prompt_logprobs": "1"}, False, False),
        ({"prompt_logprobs": True}, False, False),
        ({"echo": "yes"}, False, False),
        ({"echo": True}, True, False),
        ({"echo": True, "logprob_token_ids": [1]}, False, False),
        ({"echo": True, "truncate_prompt_tokens": -1}, False, False),
    ],
)
def test_what_is_understood_is_no_obstacle_any_more(body: dict[str, Any], chat: bool, asked: bool) -> None:
    assert is_asked_for(body, chat=chat) is asked
    if asked:
        assert why_not_resumable(body) is not None
        assert why_not_resumable(rest(body)) is None


def test_the_question_asks_for_the_prompt_and_for_nothing_that_forbids_a_short_answer() -> None:
    body = {
        "model": "m",
        "prompt": "x",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 90,
        "min_tokens": 5,
        "n": 2,
        "seed": 3,
    }
    assert question(body) == {"model": "m", "prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}
    chat = {"messages": [], "prompt_logprobs": 2, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9}
    assert question(chat) == {"messages": [], "prompt_logprobs": 2, "max_tokens": 1}


def test_a_whole_answer_has_the_prompt_before_the_output() -> None:
    part = PromptPart.of(encoded(ABOUT_PROMPT), echo=True, chat=False)
    got = json.loads(part.whole(encoded(whole("".join(OUTPUT), logprobs(OUTPUT))), chat=False))
    told = logprobs(TOKENS + OUTPUT, first=None)
    told["token_logprobs"][4:] = logprobs(OUTPUT)["token_logprobs"]
    told["top_logprobs"][4:] = logprobs(OUTPUT)["top_logprobs"]
    assert got == whole("".join(TOKENS + OUTPUT), told, prompt_logprobs=PROMPT_LOGPROBS)


def test_without_logprobs_the_text_alone_is_put_before() -> None:
    part = PromptPart.of(encoded(whole("Once", None)), echo=True, chat=False)
    assert json.loads(part.whole(encoded(whole(" a", None)), chat=False)) == whole("Once a", None)


def test_prompt_logprobs_are_put_where_either_api_has_them() -> None:
    told = whole("x", None, prompt_logprobs=PROMPT_LOGPROBS)
    part = PromptPart.of(encoded(told), echo=False, chat=False)
    assert json.loads(part.whole(encoded(whole(" a", None)), chat=False)) == whole(
        " a", None, prompt_logprobs=PROMPT_LOGPROBS
    )
    chat = {"id": "c", "choices": [{"index": 0, "message": {"content": "x"}}], "prompt_logprobs": None}
    part = PromptPart.of(encoded(chat | {"prompt_logprobs": PROMPT_LOGPROBS}), echo=False, chat=True)
    assert json.loads(part.whole(encoded(chat), chat=True)) == chat | {"prompt_logprobs": PROMPT_LOGPROBS}


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    asked=st.booleans(),
    hiding=st.sampled_from([None, *Hiding]),
)
def test_a_stream_begins_with_the_prompt_however_its_bytes_are_split(
    sizes: list[int], asked: bool, hiding: Hiding | None
) -> None:
    told = logprobs(TOKENS, first=None) if asked else None
    part = PromptPart.of(encoded(whole("".join(TOKENS), told)), echo=True, chat=False)
    graft = StreamGraft(part, hiding, BUFFER_BYTES_MAX)
    starts = [sum(map(len, OUTPUT[:i])) for i in range(3)]
    stream = b": waiting\n\n"
    for text, start in zip(OUTPUT, starts, strict=True):
        ids = {"token_ids": [start], "prompt_token_ids": None if start else [1, 2, 3, 4]}
        stream += chunk(text, logprobs([text], start=start) if asked else None, **ids)
    stream += b'data: {"choices":[],"usage":{"prompt_tokens":4}}\n\ndata: [DONE]\n\n'
    got, position = b"", 0
    while position < len(stream):
        size = sizes[position % len(sizes)]
        got += graft.take(stream[position : position + size])
        position += size
    assert got.startswith(b": waiting\n\n")
    assert got.endswith(b'data: {"choices":[],"usage":{"prompt_tokens":4}}\n\ndata: [DONE]\n\n')
    chunks = [json.loads(line[6:]) for line in got.decode().split("\n\n")[1:4]]
    choices = [c["choices"][0] for c in chunks]
    assert "".join(choice["text"] for choice in choices) == "".join(TOKENS + OUTPUT)
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2, 3, 4], None, None]
    for choice, start in zip(choices, starts, strict=True):
        match hiding:
            case None:
                assert choice["token_ids"] == [start]
            case Hiding.NULL:
                assert choice["token_ids"] is None
            case Hiding.ABSENT:
                assert "token_ids" not in choice
    if asked:
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == logprobs(TOKENS + OUTPUT)["text_offset"]
        assert [t for choice in choices for t in choice["logprobs"]["tokens"]] == TOKENS + OUTPUT
        assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [5, 1, 1]
    else:
        assert all(choice["logprobs"] is None for choice in choices)


def test_a_stream_that_has_no_room_for_its_prompt_is_named_and_its_error_goes_out_whole() -> None:
    part = PromptPart.of(encoded(whole("".join(TOKENS), logprobs(TOKENS, first=None))), echo=True, chat=False)
    graft = StreamGraft(part, Hiding.NULL, 1000)
    error = b'data: {"error":{"message":"no room","code":502}}\n\n'
    for _ in range(2):
        with pytest.raises(NoPromptPart, match="no room for its prompt"):
            graft.take(chunk(" a", {"tokens": 1, "text_offset": 2}))
        assert graft.take(error) == error
    with pytest.raises(EngineError, match="more than 1000 bytes"):
        graft.take(b"data: " + b"x" * 2000)
    assert graft.take(error) == error


def test_offsets_that_are_none_are_named() -> None:
    part = PromptPart.of(encoded(whole("".join(TOKENS), logprobs(TOKENS, first=None))), echo=True, chat=False)
    graft = StreamGraft(part, None, BUFFER_BYTES_MAX)
    graft.take(chunk(" a", logprobs([" a"])))
    with pytest.raises(NoPromptPart, match="no room for its prompt"):
        graft.take(chunk(" b", None).replace(b'"logprobs":null', b'"logprobs":{"text_offset":[%s]}' % (b"9" * 5000)))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"choices":[]}', b"\xff"])
def test_an_answer_that_tells_nothing_of_the_prompt_is_named(raw: bytes) -> None:
    with pytest.raises(NoPromptPart, match="about the prompt"):
        PromptPart.of(raw, echo=True, chat=False)
    part = PromptPart.of(encoded(ABOUT_PROMPT), echo=True, chat=False)
    with pytest.raises(NoPromptPart, match="no room"):
        part.whole(raw, chat=False)


def test_tokens_without_offsets_tell_nothing_of_the_prompt() -> None:
    with pytest.raises(NoPromptPart, match="about the prompt"):
        PromptPart.of(encoded(whole("x", logprobs(["x"]) | {"text_offset": []})), echo=True, chat=False)
