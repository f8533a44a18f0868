"""What stands in the way of going on exactly in the Responses and Messages APIs. Pure.

One response must be one request to one engine: what an engine keeps for later (background runs, stored responses), and
what makes it ask itself again (tools that it runs), cannot be taken up by another. `eligible` has the other APIs.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

Body = Mapping[str, Any]

# Tools that the client runs; all others are the engine's, or servers that it would call.
_CLIENTS_TOOLS = frozenset({"function", "custom", "namespace"})
_LOGPROBS = "message.output_text.logprobs"
# What an engine turns into something else than tokens of text.
_MEDIA = ("image", "audio", "video", "file", "document")


class EventObstacle(StrEnum):
    """Why a request of these APIs cannot go on exactly."""

    UNCLEAR_STREAM = "stream"
    BACKGROUND = "background"
    STORED = "store"
    PREVIOUS_RESPONSE = "previous_response_id"
    SERVER_TOOLS = "server_tools"
    LOGPROBS = "logprobs"
    MULTIMODAL = "multimodal"
    NO_OUTPUT = "no_output"
    ENCODER_TRANSFER = "ec_transfer_params"


# There is no session in these: it is the engine's to say what was meant, or it goes on without its client.
NO_SESSION = frozenset({EventObstacle.UNCLEAR_STREAM, EventObstacle.NO_OUTPUT, EventObstacle.BACKGROUND})

Rule = tuple[Callable[[Body], bool], EventObstacle]


def _unclear_stream(body: Body) -> bool:
    stream = body.get("stream")
    return stream is not None and not isinstance(stream, bool)


def _server_tools(body: Body) -> bool:
    tools = body.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and tool.get("type", "function") not in _CLIENTS_TOOLS for tool in tools
    )


def _wants_logprobs(body: Body) -> bool:
    include = body.get("include")
    return isinstance(include, list) and _LOGPROBS in include


def _holds_media(value: Any) -> bool:
    """Whether some part of a conversation is no text; a part says so in its type."""
    match value:
        case list():
            return any(_holds_media(item) for item in value)
        case dict():
            kind = value.get("type")
            if isinstance(kind, str) and any(word in kind for word in _MEDIA):
                return True
            return any(_holds_media(value.get(name)) for name in ("content", "output"))
    return False


_BOTH: tuple[Rule, ...] = (
    (_unclear_stream, EventObstacle.UNCLEAR_STREAM),
    (lambda body: body.get("ec_transfer_params") is not None, EventObstacle.ENCODER_TRANSFER),
)
_RESPONSES: tuple[Rule, ...] = (
    *_BOTH,
    (lambda body: bool(body.get("background")), EventObstacle.BACKGROUND),
    # Only where it is said: whoever says nothing has it too, but an engine must be told to store anything at all.
    (lambda body: body.get("store") is True, EventObstacle.STORED),
    (lambda body: body.get("previous_response_id") is not None, EventObstacle.PREVIOUS_RESPONSE),
    (_server_tools, EventObstacle.SERVER_TOOLS),
    # Those of tokens that were never sent die with the engine, and no ids tell which these are.
    (_wants_logprobs, EventObstacle.LOGPROBS),
    (lambda body: _holds_media(body.get("input")), EventObstacle.MULTIMODAL),
    (lambda body: body.get("max_output_tokens") == 0, EventObstacle.NO_OUTPUT),
)
_MESSAGES: tuple[Rule, ...] = (
    *_BOTH,
    (lambda body: _holds_media(body.get("messages")), EventObstacle.MULTIMODAL),
    (lambda body: body.get("max_tokens") == 0, EventObstacle.NO_OUTPUT),
)


def why_no_response(body: Body) -> EventObstacle | None:
    """The first obstacle in a request to `/v1/responses`, or None."""
    return next((reason for rule, reason in _RESPONSES if rule(body)), None)


def why_no_message(body: Body) -> EventObstacle | None:
    """The first obstacle in a request to `/v1/messages`, or None."""
    return next((reason for rule, reason in _MESSAGES if rule(body)), None)
