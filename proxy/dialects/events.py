"""The words in which streams without token ids are spliced: what an event is, whatever its dialect calls it. Pure.

Owns `Piece` and the contract of a dialect of events (`responses`, `messages`). Such a stream is a sequence of frames
(the answer begins, an item is added, a part is closed) with runs of text between them. Two engines that say the same
differ only in how text is cut into deltas, and in what each calls things (ids, time stamps, numbers).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from ..sse import Event, encode_event

# A name that an engine drew, and the member in which it stands.
Name = tuple[str, str | int]


class Role(StrEnum):
    """What an event does to the answer."""

    TEXT = "text"
    FRAME = "frame"
    # Closes what is open. An engine that gives a request up closes it too, so only what follows proves an end.
    CLOSES = "closes"
    ENDS = "ends"
    ABORTED = "aborted"
    ERROR = "error"
    # Nothing of the answer: it may be left out.
    IDLE = "idle"


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One event, understood.

    `key` names the field that grows, or is equal for two frames exactly when they say the same. `text` is what the
    field grows by, or an error's message; `status` an error's HTTP status.
    """

    role: Role
    key: str = ""
    text: str = ""
    sequence: int | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """What to change in an event of a later engine: characters that the client has, names, and the event's number."""

    dropped: int = 0
    names: Mapping[Name, str | int] = field(default_factory=dict)
    sequence: int = 0


class Api(Protocol):
    """What handlers ask of an API that is none of OpenAI's completions, however its streams are spliced."""

    # Whether an answer that the engine gave up ends as one that is complete, so that the stream cannot tell.
    hides_aborts: bool
    # Whether requests have a field for a seed.
    takes_seed: bool

    def gave_up(self, body: bytes) -> bool:
        """Whether an unstreamed answer says that the engine did not finish it."""
        ...

    def error_body(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own as a whole answer."""
        ...

    def error_event(self, kind: str, code: str, message: str, sequence: int) -> bytes:
        """The same as the last event of a stream."""
        ...


class EventDialect(Api, Protocol):
    """How one API's events look."""

    def read(self, event: Event) -> Piece | None:
        """What an event with data is; None if it is not of this dialect."""
        ...

    def names(self, data: bytes) -> tuple[Name, ...]:
        """The names that the engine drew for what a frame begins, in a fixed order."""
        ...

    def edited(self, event: Event, edit: Edit) -> bytes:
        """The event's bytes with `edit` made; all else stays as the engine wrote it."""
        ...

    def formality_after(self, key: str) -> bytes | None:
        """The bytes that must follow the frame `key` and are known without an engine, if they are the last ones."""
        ...


def decoded(data: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None if it is something else."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def frame_key(kind: str, body: dict[str, Any]) -> str:
    """The key of a frame whose `body` holds only what must be the same on every engine."""
    return f"{kind} {blake2b(msgspec.json.encode(body, order='sorted'), digest_size=16).hexdigest()}"


def encoded(name: str, body: dict[str, Any]) -> bytes:
    """An event with a name (if it is not empty) and a body."""
    return (f"event: {name}\n".encode() if name else b"") + encode_event(msgspec.json.encode(body))


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy of an object without some of its members."""
    return {name: value for name, value in body.items() if name not in names}


def bounded(text: object) -> str:
    """An engine's error message, as it is told on."""
    return str(text or "no message")[:500]
