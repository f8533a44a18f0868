"""Writes OpenAI chunks: trimmed to what a client lacks, under the first identity, or an ending of our own. Pure.

Invariant: an edit removes or replaces what it names and leaves the rest of the chunk as the engine wrote it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from ..sse import encode_event
from .openai import DONE, Chunk, tool_key


@dataclass(frozen=True, slots=True)
class Identity:
    """What must not change from chunk to chunk of one stream, although another engine writes on."""

    id: str | None
    object: str | None
    created: int | None
    model: str | None
    system_fingerprint: str | None

    @classmethod
    def of(cls, chunk: Chunk) -> "Identity":
        """The identity of the stream that begins with `chunk`."""
        return cls(chunk.id, chunk.object, chunk.created, chunk.model, chunk.system_fingerprint)

    def header(self) -> dict[str, Any]:
        """The fields with which a chunk of our own begins."""
        fields = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Trim:
    """What to take off the front of a chunk because the client has it."""

    ids: int
    chars: dict[str, int] = field(default_factory=dict)
    role: bool = False
    prompt_ids: bool = False
    # Tool calls whose head (id, type, name) the client has, under another id perhaps.
    tool_heads: frozenset[int] = frozenset()


def with_identity(raw: bytes, chunk: Chunk, identity: Identity) -> bytes:
    """`raw` (an event or its data) under another identity; all other bytes stay."""
    for name in ("id", "created", "model", "system_fingerprint"):
        old, new = getattr(chunk, name), getattr(identity, name)
        if old is None or new is None or old == new:
            continue
        pattern, replacement = _member(name, old), rb"\g<1>" + msgspec.json.encode(new).replace(b"\\", b"\\\\")
        raw = pattern.sub(replacement, raw, count=1)
    return raw


@lru_cache(maxsize=4096)
def _member(name: str, value: str | int) -> re.Pattern[bytes]:
    # A member with this name and this very value: the top-level one, wherever the engine puts it. Its quotes are not
    # escaped, so it is never a piece of some text.
    literal = re.escape(msgspec.json.encode(value))
    return re.compile(rb'(?<!\\)("' + name.encode() + rb'"\s*:\s*)' + literal + rb"(?![\d.eE])")


def trimmed(data: bytes, trim: Trim) -> bytes:
    """The data of a chunk without what `trim` names."""
    body: dict[str, Any] = msgspec.json.decode(data)
    if trim.prompt_ids:
        body.pop("prompt_token_ids", None)
    for choice in body.get("choices") or ():
        _trim_choice(choice, trim)
    return msgspec.json.encode(body)


def _trim_choice(choice: dict[str, Any], trim: Trim) -> None:
    left = dict(trim.chars)

    def cut(owner: dict[str, Any], name: str, key: str) -> None:
        text = owner.get(name)
        if isinstance(text, str):
            dropped = min(left.get(key, 0), len(text))
            left[key] = left.get(key, 0) - dropped
            owner[name] = text[dropped:]

    if trim.prompt_ids:
        choice.pop("prompt_token_ids", None)
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        if isinstance(choice.get("logprobs"), dict):
            choice["logprobs"] = _trim_logprobs(choice["logprobs"], len(ids) - trim.ids)
        choice["token_ids"] = ids[trim.ids :]
    cut(choice, "text", "text")
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return
    if trim.role:
        delta.pop("role", None)
    for name in ("content", "reasoning", "reasoning_content"):
        cut(delta, name, name)
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        kept = [call for call in calls if _trim_call(call, trim, cut)]
        if kept:
            delta["tool_calls"] = kept
        else:
            del delta["tool_calls"]


def _trim_call(call: dict[str, Any], trim: Trim, cut: Callable[[dict[str, Any], str, str], None]) -> bool:
    """Trim one tool call; whether anything of it is left."""
    index = call.get("index", 0)
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    if index in trim.tool_heads:
        call.pop("id", None)
        call.pop("type", None)
        function.pop("name", None)
    cut(function, "arguments", tool_key(index, "arguments"))
    return bool(call.get("id") or function.get("name") or function.get("arguments"))


def _trim_logprobs(logprobs: dict[str, Any], kept: int) -> dict[str, Any]:
    """Logprobs of the last `kept` tokens: chats have one list (`content`), completions parallel ones."""
    return {
        name: (value[-kept:] if kept > 0 else []) if isinstance(value, list) else value
        for name, value in logprobs.items()
    }


def finish_event(identity: Identity, finish: str, *, chat: bool, wants_ids: bool) -> bytes:
    """The chunk that ends the only choice, with nothing in it but its finish reason."""
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["delta"] = {"content": ""}
    else:
        choice["text"] = ""
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    if wants_ids:
        choice["token_ids"] = []
    return encode_event(msgspec.json.encode(identity.header() | {"choices": [choice]}))


def usage_event(identity: Identity, *, prompt_tokens: int, completion_tokens: int) -> bytes:
    """The chunk that carries the counts of the whole answer."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return encode_event(msgspec.json.encode(identity.header() | {"choices": [], "usage": usage}))


def done_event() -> bytes:
    """The event after the last chunk."""
    return encode_event(DONE)


def error_event(message: str, kind: str, code: str) -> bytes:
    """An in-band error in OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return encode_event(msgspec.json.encode({"error": error}))
