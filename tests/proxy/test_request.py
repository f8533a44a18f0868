"""Which requests become sessions, and what of them reaches an engine."""

import json
from typing import Any

import pytest

from midstream.proxy.dialects.hiding import Hiding
from midstream.proxy.eligible import NotResumable, why_not_resumable
from midstream.proxy.request import Outgoing, parse_body, wants_seed, wishes_of, without_transfer_fields
from midstream.session.ids import SessionId
from midstream.session.marker import Marker


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"n": 1, "best_of": 1, "stream": False, "echo": False, "use_beam_search": False}, None),
        ({"n": None, "prompt": "x", "stream": True}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": ["x"]}, None),
        ({"n": 2}, NotResumable.SEVERAL_CHOICES),
        ({"best_of": 2}, NotResumable.BEST_OF),
        ({"use_beam_search": True}, NotResumable.BEAM_SEARCH),
        ({"prompt": ["x", "y"]}, NotResumable.SEVERAL_PROMPTS),
        ({"prompt": [[1], [2]]}, NotResumable.SEVERAL_PROMPTS),
        ({"prompt_embeds": "AAAA"}, NotResumable.PROMPT_EMBEDS),
        ({"echo": True}, NotResumable.ECHO),
        ({"prompt_logprobs": 0}, NotResumable.PROMPT_LOGPROBS),
        ({"max_tokens": 0}, NotResumable.NO_OUTPUT),
        ({"include_reasoning": False, "logprobs": True}, NotResumable.HIDDEN_IDS),
        ({"include_reasoning": False, "logprobs": 0}, NotResumable.HIDDEN_IDS),
        ({"include_reasoning": False, "logprobs": False}, None),
        ({"ec_transfer_params": {}}, NotResumable.ENCODER_TRANSFER),
        ({"stream": "true"}, NotResumable.UNCLEAR_STREAM),
        ({"stream": 1}, NotResumable.UNCLEAR_STREAM),
    ],
)
def test_each_rule_has_its_reason(body: dict[str, Any], reason: NotResumable | None) -> None:
    assert why_not_resumable(body) is reason


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b'{"a":1}x', b"\xff\xfe", b'{"a":\xff}'])
def test_what_is_not_an_object_of_json_is_named(raw: bytes) -> None:
    with pytest.raises(ValueError, match="the request body is"):
        parse_body(raw)


def test_transfer_fields_are_removed_wherever_engines_look_for_them() -> None:
    field: dict[str, Any] = {"kv_transfer_params": {"midstream": {}}}
    body = {
        **field,
        "vllm_xargs": {**field, "a": 1},
        "sampling_params": {**field, "extra_args": {**field, "b": 2}},
        "messages": [field],
    }
    assert without_transfer_fields(body) == {
        "vllm_xargs": {"a": 1},
        "sampling_params": {"extra_args": {"b": 2}},
        "messages": [field],
    }


def test_a_body_without_transfer_fields_is_the_same_object() -> None:
    body = {"vllm_xargs": {"a": 1}, "prompt": "kv_transfer_params"}
    assert without_transfer_fields(body) is body


def test_each_attempt_sends_the_same_request_but_for_the_marker() -> None:
    outgoing = Outgoing({"prompt": "x", "kv_transfer_params": {"mine": 1}}, seed=7)
    first = json.loads(outgoing.encode(Marker(SessionId("a" * 32), 1)))
    second = json.loads(outgoing.encode(Marker(SessionId("a" * 32), 2)))
    assert first.pop("kv_transfer_params") == {
        "midstream": {"v": 1, "session": "a" * 32, "generation": 1},
    }
    assert second.pop("kv_transfer_params")["midstream"]["generation"] == 2
    assert first == second == {"prompt": "x", "return_token_ids": True, "seed": 7}


@pytest.mark.parametrize(
    ("body", "wants"),
    [
        ({}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0.0}, False),
        ({"seed": 3}, False),
        ({"seed": -1}, True),
        ({"seed": 0}, False),
    ],
)
def test_only_unseeded_sampling_wants_a_seed(body: dict[str, Any], wants: bool) -> None:
    assert wants_seed(body) is wants
    # A member that the engine does not know is no seed.
    assert wants_seed(body, takes_seed=False) is ("temperature" not in body)


def test_what_may_hold_text_back_is_known_from_the_request() -> None:
    plain = wishes_of({"stop": None, "stop_token_ids": [1]}, chat=True, hiding=Hiding.NULL)
    assert not plain.holds_back
    bodies: list[dict[str, Any]] = [{"stop": "x"}, {"stop": ["x"]}, {"tools": [{}]}]
    for body in bodies:
        assert wishes_of(body, chat=True, hiding=Hiding.NULL).holds_back
