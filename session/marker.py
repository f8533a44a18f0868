"""The marker that the sidecar puts into a request, and the resume record in it.

Owns the JSON form of both (docs/design.md). Engine plugins read it, the proxy writes it; clients must not be able to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .ids import SessionId, session_id

MARKER_VERSION = 1
FIELD = "kv_transfer_params"
NAME = "midstream"


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
    """What travels with a request: whose it is, which owner this is, and where it goes on."""

    session: SessionId
    generation: int
    resume: Resume | None = None

    def to_json(self) -> dict[str, Any]:
        """The marker as the JSON object that goes under `kv_transfer_params.midstream`."""
        body: dict[str, Any] = {
            "v": MARKER_VERSION,
            "session": self.session,
            "generation": self.generation,
        }
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
            return cls(
                session_id(body["session"]),
                int(body["generation"]),
                None
                if resume is None
                else Resume(
                    _ids(resume["outputs"]),
                    KvSource(resume["kv"]),
                    str(resume["prompt_hash"]),
                    str(resume.get("finish", "")),
                ),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"marker: field {error} is missing or of the wrong kind") from error


def _ids(values: Sequence[object]) -> tuple[int, ...]:
    ids = tuple(int(v) for v in values)  # type: ignore[call-overload]
    if any(not 0 <= i < 1 << 32 for i in ids):
        raise ValueError("marker: token ids must be 32-bit and not negative")
    return ids


def without_marker(body: dict[str, Any]) -> dict[str, Any]:
    """A request body with everything removed that only the sidecar may set."""
    return {k: v for k, v in body.items() if k != FIELD}


def with_marker(body: dict[str, Any], marker: Marker) -> dict[str, Any]:
    """A request body that carries `marker`, and nothing that a client put in its place."""
    return {**without_marker(body), FIELD: {NAME: marker.to_json()}}
