"""Anthropic's Messages API as a stream of events: what each delivers, and what in it is only this engine's. Pure.

A stream is `message_start`, then for each block `content_block_start`, deltas and `content_block_stop` (thinking is
signed before that), then `message_delta` with the reason to stop and the counts, and `message_stop`. Ids of message and
calls and the signatures differ from engine to engine. An answer that vLLM gave up has no reason to stop.
"""

from typing import Any

import msgspec

from ..sse import Event
from .events import Edit, Name, Piece, Role, bounded, decoded, encoded, frame_key, without

_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_STOPPED = "message_delta"
# What the API calls the kinds of errors that the proxy has.
_KINDS = {"service_unavailable": "overloaded_error", "server_error": "api_error"}
_LAST_EVENT = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class _Delta(msgspec.Struct, gc=False):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _Event(msgspec.Struct, gc=False):
    """The members of a delta that count; events of other kinds have some of them, too."""

    type: str
    index: int | None = None
    delta: _Delta | None = None


_decoder = msgspec.json.Decoder(_Event)


class Messages:
    """The dialect of `/v1/messages`."""

    hides_aborts = False
    takes_seed = False

    def read(self, event: Event) -> Piece | None:
        """What an event is."""
        data = event.data or b""
        try:
            seen = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        delta = seen.delta
        if seen.type == "content_block_delta" and delta is not None and delta.type in _TEXTS:
            text = getattr(delta, _TEXTS[delta.type])
            if isinstance(text, str):
                return Piece(Role.TEXT, f"{delta.type} {seen.index}", text)
        body = decoded(data)
        if body is None:
            return None
        match seen.type:
            case "ping":
                return Piece(Role.IDLE)
            case "error":
                return _error(body)
            case "message_stop":
                return Piece(Role.ENDS, seen.type)
            case "message_start":
                # Its counts depend on what an engine had in its cache.
                return Piece(Role.FRAME, seen.type)
            case "message_delta":
                stop = body.get("delta")
                given_up = not isinstance(stop, dict) or stop.get("stop_reason") is None
                return Piece(Role.ABORTED if given_up else Role.FRAME, _STOPPED)
            case "content_block_stop" | "content_block_delta":
                # A delta that is none of the texts is the signature.
                return Piece(Role.CLOSES, frame_key(seen.type, _same_everywhere(body)))
        return Piece(Role.FRAME, frame_key(seen.type, _same_everywhere(body)))

    def names(self, data: bytes) -> tuple[Name, ...]:
        """None of them comes again in a later event."""
        return ()

    def edited(self, event: Event, edit: Edit) -> bytes:
        """The event without the text that the client has."""
        if not edit.dropped:
            return event.raw
        body = decoded(event.data or b"") or {}
        delta = body["delta"]
        field = _TEXTS[delta["type"]]
        delta[field] = delta[field][edit.dropped :]
        return encoded(event.name, body)

    def formality_after(self, key: str) -> bytes | None:
        """Once a client knows why the answer stopped, only the last event is missing, which is always the same."""
        return _LAST_EVENT if key == _STOPPED else None

    def gave_up(self, body: bytes) -> bool:
        """Whether an unstreamed answer says that the engine did not finish it: nothing stopped it."""
        message = decoded(body)
        return message is not None and message.get("type") == "message" and message.get("stop_reason") is None

    def error_body(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own; `code` is a member that the API does not have, for whoever looks for it."""
        return msgspec.json.encode(_error_of_ours(kind, code, message))

    def error_event(self, kind: str, code: str, message: str, sequence: int) -> bytes:
        """The same as the last event of a stream."""
        return encoded("error", _error_of_ours(kind, code, message))


def _same_everywhere(body: dict[str, Any]) -> dict[str, Any]:
    same = dict(body)
    for owner, name in (("content_block", "id"), ("delta", "signature")):
        inner = same.get(owner)
        if isinstance(inner, dict):
            same[owner] = without(inner, name)
    return same


def _error(body: dict[str, Any]) -> Piece:
    error = body.get("error")
    return Piece(Role.ERROR, text=bounded(error.get("message") if isinstance(error, dict) else error))


def _error_of_ours(kind: str, code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _KINDS.get(kind, kind), "message": message, "code": code}}
