"""Requests: what is refused by name, what is read, and the shapes of what goes back."""

from typing import Any

import pytest

from midstream.adapters.transformers.fields import RequestError
from midstream.adapters.transformers.output import Finish, Piece, TokenLogprobs
from midstream.adapters.transformers.protocol import Kind, Messages, TokenIds, parse
from midstream.adapters.transformers.responses import Head, Shape, error_body

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Any:
    return parse(Kind.COMPLETION, {"prompt": "x", **fields})


def chat(**fields: Any) -> Any:
    return parse(Kind.CHAT, {"messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"some_future_field": 0}, "some_future_field"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"model": 5}, "model"),
        ({"kv_transfer_params": {"midstream": {"v": 9}}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"midstream": {"v": 1, "session": "x", "generation": 1}}}, "kv_transfer_params"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in str(caught.value) or name == "kv_transfer_params"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "x"}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="JSON object"):
        parse(Kind.CHAT, [1])


def test_what_changes_nothing_here_is_taken_and_null_is_absent() -> None:
    names = {"user": "me", "metadata": {"a": "b"}, "cache_salt": "x", "parallel_tool_calls": False, "priority": 0}
    request = completion(**names, some_future_field=None, temperature=None, stop=None, n=None)
    assert request.params.temperature == 1.0
    assert request.params.stop == ()
    assert request.params.max_tokens == 16


def test_a_chat_has_no_end_but_the_model_s_own_unless_it_says() -> None:
    assert chat().params.max_tokens is None
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).params.max_tokens == 6


def test_prompts_come_as_text_ids_or_messages() -> None:
    assert completion(prompt="text").prompt == "text"
    assert completion(prompt=["text"]).prompt == "text"
    assert completion(prompt=[1, 2]).prompt == TokenIds((1, 2))
    assert completion(prompt=[[1, 2]]).prompt == TokenIds((1, 2))
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert chat(messages=parts).prompt == Messages(({"role": "user", "content": "ab"},))


def test_a_marker_is_read() -> None:
    marker = {"v": 1, "session": "ab" * 16, "generation": 2}
    assert completion(kv_transfer_params={"midstream": marker}).marker.generation == 2
    assert completion(kv_transfer_params={"other": 1}).marker is None


def shape(request: Any) -> Shape:
    return Shape(request, Head("id-1", 7, "m"), [1, 2, 3], lambda ids: "".join(map(chr, ids)))


def test_a_chat_stream_has_openai_s_shapes() -> None:
    stream = shape(chat(stream=True, return_token_ids=True, stream_options={"include_usage": True}))
    (opening,) = stream.opening()
    assert opening == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
        "prompt_token_ids": [1, 2, 3],
    }
    chunk = stream.chunk(Piece((65,), "A"))
    assert chunk["choices"] == [
        {"index": 0, "delta": {"content": "A"}, "logprobs": None, "finish_reason": None, "token_ids": [65]}
    ]
    assert "usage" not in chunk
    last = stream.chunk(Piece((66,), "B", Finish.STOP, "x"))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] == "x"
    usage = stream.usage_chunk()
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_token_ids_are_only_there_when_asked_for() -> None:
    stream = shape(chat(stream=True))
    assert "prompt_token_ids" not in stream.opening()[0]
    assert "token_ids" not in stream.chunk(Piece((65,), "A"))["choices"][0]
    plain = shape(completion()).answer([Piece((65,), "A", Finish.LENGTH)])
    assert "token_ids" not in plain["choices"][0]


def test_completion_logprobs_carry_offsets_over_chunks() -> None:
    stream = shape(completion(logprobs=1))
    entries = [TokenLogprobs(65, -0.5, ((66, -0.1),)), TokenLogprobs(66, float("-inf"), ((66, -0.1),))]
    first, second = (stream.chunk(Piece((e.token,), "?", logprobs=(e,)))["choices"][0]["logprobs"] for e in entries)
    assert first == {
        "text_offset": [0],
        "token_logprobs": [-0.5],
        "tokens": ["A"],
        "top_logprobs": [{"B": -0.1, "A": -0.5}],
    }
    assert (second["text_offset"], second["token_logprobs"]) == ([1], [-9999.0])


def test_offsets_go_on_behind_tokens_whose_logprobs_are_not_known_any_more() -> None:
    entry = TokenLogprobs(67, -0.5, ())
    undisturbed, resumed = shape(completion(logprobs=0)), shape(completion(logprobs=0))
    for token in (65, 66):
        undisturbed.chunk(Piece((token,), "?", logprobs=(TokenLogprobs(token, -1.0, ()),)))
    resumed.chunk(Piece((65, 66), "AB"))
    wanted, got = (s.chunk(Piece((67,), "C", logprobs=(entry,))) for s in (undisturbed, resumed))
    assert got["choices"][0]["logprobs"] == wanted["choices"][0]["logprobs"]
    assert got["choices"][0]["logprobs"]["text_offset"] == [2]


def test_chat_logprobs_name_bytes() -> None:
    body = shape(chat(logprobs=True, top_logprobs=1)).answer(
        [Piece((233,), "é", Finish.LENGTH, logprobs=(TokenLogprobs(233, -1.0, ((65, -0.2),)),))]
    )
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -1.0,
            "bytes": [195, 169],
            "top_logprobs": [{"token": "A", "logprob": -0.2, "bytes": [65]}],
        }
    ]


def test_half_a_list_of_logprobs_is_none() -> None:
    pieces = [Piece((65, 66), "AB"), Piece((67,), "C", Finish.LENGTH, logprobs=(TokenLogprobs(67, -1.0, ()),))]
    assert shape(chat(logprobs=True)).answer(pieces)["choices"][0]["logprobs"] is None


def test_an_answer_has_openai_s_shape() -> None:
    body = shape(completion(return_token_ids=True)).answer([Piece((65,), "A"), Piece((66,), "B", Finish.LENGTH)])
    assert body == {
        "id": "id-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "AB",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [65, 66],
                "prompt_token_ids": [1, 2, 3],
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_an_error_names_its_kind() -> None:
    assert error_body("no", 404, "model")["error"] == {
        "message": "no",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
