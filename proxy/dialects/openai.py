"""OpenAI's completions and chat completions: what a chunk delivers, how an end and an error look.

Owns reading; `openai_edit` writes. Pure. Invariant: whatever decodes here is accounted for completely (ids, text of
every field, role, finish, usage); what does not decode is None, and the splicer then knows that it cannot account for
it.
"""

from typing import Annotated, Any

import msgspec

DONE = b"[DONE]"

# Finish reasons with which engines end what they did not finish: an interruption, never an end.
INTERRUPTED_FINISHES = frozenset({"abort", "cancelled", "error"})


# What is no id of any vocabulary makes a chunk that is not understood.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Function(msgspec.Struct, gc=False):
    """The function of a tool call's delta."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A delta of one tool call."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    """A chat delta."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One choice of a chunk: `text` in completions, `delta` in chats."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(msgspec.Struct, gc=False):
    """The counts of a usage object that the proxy needs."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One chunk of a stream, without the fields that the proxy only forwards."""

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    system_fingerprint: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | str | None = None
    prompt_token_ids: list[int] | None = None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk | None:
    """Read the data of an event; None if it is not a chunk of this dialect with at most one choice."""
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(chunk.choices) > 1 or (chunk.choices and chunk.choices[0].index != 0):
        return None
    return chunk


def texts(choice: Choice) -> list[tuple[str, str]]:
    """What a choice adds to each field that grows: pairs of the field's key and the text."""
    added: list[tuple[str, str]] = []
    if choice.text:
        added.append(("text", choice.text))
    delta = choice.delta
    if delta is None:
        return added
    if delta.content:
        added.append(("content", delta.content))
    if delta.reasoning:
        added.append(("reasoning", delta.reasoning))
    if delta.reasoning_content:
        added.append(("reasoning_content", delta.reasoning_content))
    for call in delta.tool_calls or ():
        if call.function is not None:
            if call.function.name:
                added.append((tool_key(call.index, "name"), call.function.name))
            if call.function.arguments:
                added.append((tool_key(call.index, "arguments"), call.function.arguments))
    return added


def tool_key(index: int, part: str) -> str:
    """The key of a tool call's growing field."""
    return f"tool_calls.{index}.{part}"


def only_because_of_ids(data: bytes, choice: Choice) -> bool:
    """Whether an engine sends this chunk for its token ids alone.

    vLLM's parsers (tools, reasoning) hold some tokens back; it then sends an empty delta if ids or logprobs were asked
    for, and no chunk at all otherwise.
    """
    return (
        choice.finish_reason is None
        and b'"delta":{}' in data
        and b'"logprobs":{' not in data
        and choice.token_ids is not None
    )


def error_status(error: dict[str, Any] | str) -> int | None:
    """The HTTP status that an in-band error carries, if it does."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) else None


def error_text(error: dict[str, Any] | str) -> str:
    """The message of an in-band error, bounded."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no message")[:500]
