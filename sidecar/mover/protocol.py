"""What the mover and its clients say to each other (docs/formats.md): operations, reasons, lines, results.

Pure. One JSON object a line, both ways; an answer carries the id of its request, and answers may come in another
order.
"""

import functools
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...session.errors import MidstreamError
from ...session.ids import SessionId, session_id

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")

LINE_BYTES_MAX = 64 * 1024
PATH_BYTES_MAX = 4096
DEADLINE_S_MAX = 600.0


class Op(StrEnum):
    """What can be asked of the mover."""

    WATCH = "watch"
    UNWATCH = "unwatch"
    SEAL = "seal"
    RELEASE = "release"
    RESTORE = "restore"
    VERIFY = "verify"
    SOUND = "sound"
    SNAPSHOT = "snapshot"
    STORED = "stored"
    KEPT = "kept"
    REPLICATED = "replicated"
    FINISH = "finish"
    STATUS = "status"


class Reason(StrEnum):
    """Why something did not happen: stable words for metrics."""

    REQUEST = "request"
    BUSY = "busy"
    ARENA = "arena"
    POOL = "pool"
    RANKS = "ranks"
    DESTINATION = "destination"
    GONE = "gone"
    DEADLINE = "deadline"
    SESSION = "session"
    FINISHED = "finished"
    INCOMPLETE = "incomplete"
    PROMPT = "prompt"
    TOKENS = "tokens"
    KEY = "key"
    LAYOUT = "layout"
    TABLE = "table"
    OVERLAP = "overlap"
    CHECKSUM = "checksum"
    FAULT = "fault"
    STORE = "store"
    CORRUPT = "corrupt"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"


class MoverError(MidstreamError):
    """The mover did not do what it was asked for; `reason` is a stable word, the text says fact and remedy."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """How a restore went. `tokens` positions have KV now (0 unless `ok`); `seconds` counts from the waiting slot on.

    Where its source was unfit, `kept_tokens` is how many positions are kept in memory. If there are any, the engine is
    told a little later than this is answered, so that whoever asked can place the session anew.
    """

    ok: bool
    tokens: int = 0
    bytes: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    kept_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Blocks compared with their sums. Positions [0, tokens) show no damage, [0, verified_tokens) were all compared."""

    tokens: int
    verified_tokens: int
    blocks_verified: int
    blocks_unverified: int
    blocks_damaged: int


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """How many sessions of an arena were stored, had nothing new, or were given up."""

    stored: int
    unchanged: int
    dropped: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The stored snapshot that a restore of a session would use; `found` is False when there is none.

    `key` is its compatibility key, for where nobody knows any more which engine has written it; None of what is kept
    in memory. `recomputed` as in its manifest.
    """

    found: bool
    generation: int = 0
    prompt_len: int = 0
    prompt_hash: str = ""
    kv_len: int = 0
    outputs: int = 0
    key: dict[str, Any] | None = None
    recomputed: bool = False


_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode_line(message: dict[str, Any]) -> bytes:
    """A message as its line."""
    return _encode(message).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The object in a line; MoverError when there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise MoverError(Reason.REQUEST, "the line is not JSON; send one JSON object a line") from None
    if not isinstance(message, dict):
        raise MoverError(Reason.REQUEST, "the line is not a JSON object")
    return message


def result_fields(result: "DataclassInstance") -> dict[str, Any]:
    """A result as the fields of an answer."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def result_from(kind: type[Result], answer: dict[str, Any]) -> Result:
    """A result out of an answer; unknown fields of a newer mover are left aside."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in answer.items() if name in known})


def path_field(message: dict[str, Any], name: str) -> Path:
    """An absolute path from a request."""
    value = message.get(name)
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > PATH_BYTES_MAX:
        raise MoverError(Reason.REQUEST, f"{name} is {value!r:.80}; give an absolute path")
    return _path(value)


@functools.lru_cache(maxsize=256)
def _path(value: str) -> Path:
    # The same few arenas in every request: one path of each, whose hash is computed once.
    return Path(value)


def session_field(message: dict[str, Any], name: str = "session") -> SessionId:
    """A session id from a request."""
    try:
        return session_id(message.get(name, ""))
    except (ValueError, TypeError) as error:
        raise MoverError(Reason.REQUEST, f"{name}: {error}") from error


def whole_field(message: dict[str, Any], name: str) -> int:
    """A generation or another 32-bit number from a request."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise MoverError(Reason.REQUEST, f"{name} is {value!r:.80}; give a whole number that is not negative")
    return value


def seconds_field(message: dict[str, Any], name: str) -> float:
    """A duration from a request, above 0 and at most DEADLINE_S_MAX."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= DEADLINE_S_MAX:
        raise MoverError(Reason.REQUEST, f"{name} is {value!r:.80}; give seconds, up to {DEADLINE_S_MAX:.0f}")
    return float(value)


def object_field(message: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside a request."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise MoverError(Reason.REQUEST, f"{name} is {value!r:.80}; give an object")
    return value
