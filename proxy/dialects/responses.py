"""OpenAI's Responses API as a stream of events: what each delivers, and what in it is only this engine's. Pure.

A stream is `response.created`, `response.in_progress`, then for each item `output_item.added`, deltas and `.done`
events, and `response.completed`, which repeats the whole answer; there is no `[DONE]`. Ids of response, items and
calls, the time of creation and the events' numbers differ from engine to engine; nothing else does. An answer that vLLM
gave up is completed like any other.
"""

from typing import Any

import msgspec

from ..sse import Event
from .events import Edit, Name, Piece, Role, bounded, decoded, encoded, frame_key, without

_BEGINNINGS = frozenset({"response.queued", "response.created", "response.in_progress"})
_ENDINGS = frozenset({"response.completed", "response.incomplete"})
_ERRORS = frozenset({"error", "response.failed"})
_GIVEN_UP = ("cancelled", "failed")
_NAMED = ("id", "call_id", "created_at", "model")


class _Delta(msgspec.Struct, gc=False):
    """The members of a delta that count; events of other kinds have some of them, too."""

    type: str
    delta: str | None = None
    sequence_number: int | None = None
    output_index: int | None = None
    content_index: int | None = None
    summary_index: int | None = None


_delta_decoder = msgspec.json.Decoder(_Delta)


class Responses:
    """The dialect of `/v1/responses`."""

    hides_aborts = True
    takes_seed = True

    def read(self, event: Event) -> Piece | None:
        """What an event is."""
        data = event.data or b""
        try:
            delta = _delta_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _without_type(data)
        kind, number = delta.type, delta.sequence_number
        if delta.delta is not None and kind.endswith(".delta"):
            key = f"{kind} {delta.output_index}.{delta.content_index}.{delta.summary_index}"
            return Piece(Role.TEXT, key, delta.delta, number)
        if kind in _BEGINNINGS:
            # They repeat the request, with defaults that are the engine's own.
            return Piece(Role.FRAME, kind, sequence=number)
        body = decoded(data)
        if body is None:
            return None
        if kind in _ERRORS:
            return _error(body)
        if kind in _ENDINGS:
            response = body.get("response")
            aborted = isinstance(response, dict) and response.get("status") in _GIVEN_UP
            return Piece(Role.ABORTED if aborted else Role.ENDS, kind, sequence=number)
        role = Role.CLOSES if kind.endswith(".done") else Role.FRAME
        return Piece(role, frame_key(kind, _same_everywhere(body)), sequence=number)

    def names(self, data: bytes) -> tuple[Name, ...]:
        """The ids of the response or item that begins with this frame."""
        body = decoded(data) or {}
        return tuple(
            (name, owner[name])
            for owner in (body.get("response"), body.get("item"))
            if isinstance(owner, dict)
            for name in _NAMED
            if isinstance(owner.get(name), str | int)
        )

    def edited(self, event: Event, edit: Edit) -> bytes:
        """The event under the first stream's names and numbers."""
        body = decoded(event.data or b"") or {}
        if "sequence_number" in body:
            body["sequence_number"] = edit.sequence
        if edit.dropped:
            body["delta"] = body["delta"][edit.dropped :]
        if isinstance(body.get("item_id"), str):
            body["item_id"] = edit.names.get(("id", body["item_id"]), body["item_id"])
        response = body.get("response")
        owners = [response, body.get("item")]
        if isinstance(response, dict) and isinstance(response.get("output"), list):
            owners += response["output"]
        for owner in owners:
            if isinstance(owner, dict):
                _rename(owner, edit)
        return encoded(event.name, body)

    def formality_after(self, key: str) -> bytes | None:
        """Nothing is: the last event repeats the whole answer, and only an engine can write it."""
        return None

    def gave_up(self, body: bytes) -> bool:
        """Whether an unstreamed answer says that the engine did not finish it."""
        response = decoded(body)
        return response is not None and response.get("status") in _GIVEN_UP

    def error_body(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own, in the shape that all of OpenAI's have."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def error_event(self, kind: str, code: str, message: str, sequence: int) -> bytes:
        """The same as the last event of a stream."""
        body = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": sequence}
        return encoded("error", body)


def _same_everywhere(body: dict[str, Any]) -> dict[str, Any]:
    same = without(body, "sequence_number", "item_id")
    item = same.get("item")
    if isinstance(item, dict):
        same["item"] = without(item, *_NAMED)
    return same


def _rename(owner: dict[str, Any], edit: Edit) -> None:
    for name in _NAMED:
        value = owner.get(name)
        if isinstance(value, str | int):
            owner[name] = edit.names.get((name, value), value)


def _without_type(data: bytes) -> Piece | None:
    """Events with no type: errors in the shape of unstreamed answers, or nothing of this dialect."""
    body = decoded(data)
    return _error(body) if body is not None and "error" in body else None


def _error(body: dict[str, Any]) -> Piece:
    inner: Any = body.get("response") if isinstance(body.get("response"), dict) else body
    inner = inner.get("error") or body
    if not isinstance(inner, dict):
        return Piece(Role.ERROR, text=bounded(inner))
    code = inner.get("code")
    return Piece(Role.ERROR, text=bounded(inner.get("message")), status=code if type(code) is int else None)
