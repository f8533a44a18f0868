"""What stands in the way of going on exactly in the Responses and Messages APIs."""

from typing import Any

import pytest

from midstream.proxy.dialects.by_path import errors_of, events_of
from midstream.proxy.eligible import NO_SESSION, why_not_resumable
from midstream.proxy.eligible_events import EventObstacle

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ({}, None),
        ({"input": "an image", "store": False, "background": False, "stream": True}, None),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}, None),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, None),
        ({"n": 3, "prompt": None}, None),
        ({"stream": "yes"}, EventObstacle.UNCLEAR_STREAM),
        ({"background": True}, EventObstacle.BACKGROUND),
        ({"store": True}, EventObstacle.STORED),
        ({"previous_response_id": "resp_1"}, EventObstacle.PREVIOUS_RESPONSE),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, EventObstacle.SERVER_TOOLS),
        ({"tools": [{"type": "web_search_preview"}]}, EventObstacle.SERVER_TOOLS),
        ({"tools": [{"type": "code_interpreter"}]}, EventObstacle.SERVER_TOOLS),
        ({"include": ["message.output_text.logprobs"]}, EventObstacle.LOGPROBS),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, EventObstacle.MULTIMODAL),
        ({"input": [{"type": "function_call_output", "output": [IMAGE]}]}, EventObstacle.MULTIMODAL),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "an image"}]}]}, None),
        ({"max_output_tokens": 0}, EventObstacle.NO_OUTPUT),
        ({"ec_transfer_params": {}}, EventObstacle.ENCODER_TRANSFER),
    ],
)
def test_a_response_that_only_its_engine_can_go_on_with_is_known(
    body: dict[str, Any], obstacle: EventObstacle | None
) -> None:
    assert why_not_resumable(body, RESPONSES) is obstacle


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, EventObstacle.MULTIMODAL),
        (
            {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            EventObstacle.MULTIMODAL,
        ),
        ({"messages": [{"content": [{"type": "document"}]}]}, EventObstacle.MULTIMODAL),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, None),
        ({"stream": 1}, EventObstacle.UNCLEAR_STREAM),
        ({"max_tokens": 0}, EventObstacle.NO_OUTPUT),
        ({"store": True, "background": True}, None),
    ],
)
def test_a_message_that_only_its_engine_can_go_on_with_is_known(
    body: dict[str, Any], obstacle: EventObstacle | None
) -> None:
    assert why_not_resumable(body, MESSAGES) is obstacle


def test_an_engine_goes_on_by_itself_only_in_the_background() -> None:
    assert {word for word in EventObstacle if word in NO_SESSION} == {"stream", "no_output", "background"}


def test_a_path_has_one_dialect() -> None:
    assert events_of(RESPONSES) is not None
    assert events_of(MESSAGES) is not None
    for other in ("/v1/messages/count_tokens", "/v1/responses/resp_1/cancel", "/v1/chat/completions", "/v1/messagesx"):
        assert events_of(other) is None
    assert errors_of("/v1/messages/count_tokens") is events_of(MESSAGES)
    assert errors_of("/v1/messagesx") is None
