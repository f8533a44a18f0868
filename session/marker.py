"""The marker that the sidecar puts into a request, and the resume record in it.

Owns the JSON form of both (docs/design.md). Engine plugins read it, the proxy writes it; clients must not be able to.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from .ids import SessionId, session_id

MARKER_VERSION = 1
FIELD = "kv_transfer_params"
NAME = "midstream"
FINISHES = ("", "stop", "length")


class KvSource(StrEnum):
    """Where the KV of a resumed session comes from."""

    HELD = "held"
    IN_PLACE = "in-place"
    DISK = "disk"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a session goes on: `outputs` are re-entered as outputs, KV of all but the last position is offered.

    With `finish` ("stop" or "length") the outputs are the whole answer: the engine's front end writes the ending, and
    nothing is computed.
    """

    outputs: tuple[int, ...]
    kv: KvSource
    prompt_hash: str
    finish: str = ""


@dataclass(frozen=True, slots=True)
class Marker:
    """What travels with a request: whose it is, which owner this is, and where it goes on.

    `seed` is for requests of an API that has no field for one.
    """

    session: SessionId
    generation: int
    resume: Resume | None = None
    seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The marker as the JSON object that goes under `kv_transfer_params.midstream`."""
        body: dict[str, Any] = {
            "v": MARKER_VERSION,
            "session": self.session,
            "generation": self.generation,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.resume is not None:
            body["resume"] = {
                "outputs": list(self.resume.outputs),
                "kv": self.resume.kv.value,
                "prompt_hash": self.resume.prompt_hash,
                "finish": self.resume.finish,
            }
        return body

    @classmethod
    def from_json(cls, body: object) -> "Marker":
        """Read a marker; ValueError if it is not one of this version."""
        if not isinstance(body, dict) or body.get("v") != MARKER_VERSION:
            raise ValueError(f"marker: expected an object with v={MARKER_VERSION}, got {body!r:.80}")
        resume = body.get("resume")
        try:
            generation = body["generation"]
            if not _is_u32(generation) or generation == 0:
                raise ValueError(f"marker: generation {generation!r:.80} is no 32-bit number above 0")
            session = session_id(body["session"])
            return cls(session, generation, None if resume is None else _resume(resume), _seed(body.get("seed")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"marker: field {error} is missing or of the wrong kind") from error


def _resume(body: dict[str, Any]) -> Resume:
    outputs, finish = body["outputs"], body.get("finish", "")
    if not isinstance(outputs, list) or not all(map(_is_u32, outputs)):
        raise ValueError("marker: outputs must be a list of token ids, 32-bit and not negative")
    if finish not in FINISHES:
        raise ValueError(f"marker: finish {finish!r:.80} is none of {', '.join(map(repr, FINISHES))}")
    return Resume(tuple(outputs), KvSource(body["kv"]), str(body["prompt_hash"]), finish)


def _seed(value: object) -> int | None:
    if value is None or _is_u32(value):
        return value
    raise ValueError(f"marker: seed {value!r:.80} is no 32-bit number, not negative")


def _is_u32(value: object) -> TypeGuard[int]:
    # Exactly an integer: what JSON calls 1.0, "1" or true was not written by a sidecar.
    return type(value) is int and 0 <= value < 1 << 32


def without_marker(body: dict[str, Any]) -> dict[str, Any]:
    """A request body with everything removed that only the sidecar may set."""
    return {k: v for k, v in body.items() if k != FIELD}


def with_marker(body: dict[str, Any], marker: Marker) -> dict[str, Any]:
    """A request body that carries `marker`, and nothing that a client put in its place."""
    return {**without_marker(body), FIELD: {NAME: marker.to_json()}}
