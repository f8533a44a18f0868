"""What stands in the way of going on exactly in `/generate`, and what such a request says of its sampling."""

from typing import Any

import pytest

from midstream.proxy.eligible import NO_SESSION, why_not_resumable
from midstream.proxy.eligible_generate import GenerateObstacle
from midstream.proxy.request import Outgoing, samples, wants_seed
from midstream.session.ids import SessionId
from midstream.session.marker import Marker

PATH = "/generate"


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ({"text": "x", "sampling_params": {"max_new_tokens": 5, "n": 1}, "stream": True}, None),
        ({"input_ids": [1, 2], "return_logprob": False, "image_data": None}, None),
        ({"text": ["x", "y"]}, GenerateObstacle.SEVERAL_PROMPTS),
        ({"input_ids": [[1], [2]]}, GenerateObstacle.SEVERAL_PROMPTS),
        ({"text": "x", "sampling_params": [{}]}, GenerateObstacle.SEVERAL_PROMPTS),
        ({"text": "x", "sampling_params": {"n": 2}}, GenerateObstacle.SEVERAL_CHOICES),
        ({"input_embeds": [[0.1]]}, GenerateObstacle.PROMPT_EMBEDS),
        ({"text": "x", "image_data": "data:"}, GenerateObstacle.MULTIMODAL),
        ({"text": "x", "return_logprob": True}, GenerateObstacle.LOGPROBS),
        ({"text": "x", "return_hidden_states": True}, GenerateObstacle.HIDDEN_STATES),
        ({"text": "x", "session_params": {"id": "s"}}, GenerateObstacle.ENGINE_SESSION),
        ({"text": "x", "stream": 1}, GenerateObstacle.UNCLEAR_STREAM),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, GenerateObstacle.NO_OUTPUT),
    ],
)
def test_a_request_that_only_its_engine_can_go_on_with_is_known(
    body: dict[str, Any], obstacle: GenerateObstacle | None
) -> None:
    assert why_not_resumable(body, PATH) is obstacle


def test_where_nothing_is_generated_there_is_no_session() -> None:
    assert {GenerateObstacle.UNCLEAR_STREAM, GenerateObstacle.NO_OUTPUT} <= NO_SESSION


@pytest.mark.parametrize(
    ("params", "sampled", "unseeded"),
    [
        (None, True, True),
        ({}, True, True),
        ({"temperature": 0}, False, False),
        ({"temperature": 0.5, "sampling_seed": 3}, True, False),
        ({"temperature": 0.5}, True, True),
    ],
)
def test_its_sampling_is_read_where_it_says_it(params: dict[str, Any] | None, sampled: bool, unseeded: bool) -> None:
    # What other APIs would read means nothing here, and the other way round.
    body = {"text": "x", "sampling_params": params, "temperature": 0, "seed": 5}
    assert samples(body, PATH) is sampled
    assert wants_seed(body, PATH, takes_seed=False) is unseeded
    assert not samples(body)


def test_the_seed_that_is_drawn_goes_with_the_marker_and_ids_are_not_asked_for() -> None:
    outgoing = Outgoing({"text": "x"}, 7, asks_ids=False, takes_seed=False)
    sent = outgoing.encode(Marker(SessionId("a" * 32), 1))
    assert b'"seed":7' in sent
    assert b"return_token_ids" not in sent
