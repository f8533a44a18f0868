"""Streams of gateways that nodes keep, too, so that another gateway can go on with them when the first is no more.

Owns what is told with a request: whose stream its answer is a part of, and what a node tells of one that it keeps. Why
that is enough: what a gateway makes of the events of its first node, where these show ids and it is one choice, is said
of each event by itself, and so is its number. So another gateway that reads the same events from the first one on says
the same bytes under the same numbers. Invariant: nothing of this is believed of a client, and nobody goes on with what
another version of this code, or another request, has begun. Pure.
"""

import re
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from ..session.ids import SessionId, session_id
from ..session.marker import FIELD
from .coordinator import Placement, SessionFacts
from .event_ids import is_token
from .permission import Permission

# Beside the marker, where no client's word gets to.
_NAME = "stream"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TEXT_MAX = 200
# How a gateway asks a node whether it keeps a stream: in the head of a question that the fleet vouches for.
LOOK = "X-Midstream-Look"


@dataclass(frozen=True, slots=True)
class Origin:
    """A stream of a gateway: its name, what it answers, and whose it is (a member's id).

    `adopts`: the gateway is another one, and what is kept is wanted from its beginning.
    """

    token: str
    digest: str
    owner: str
    code: str
    adopts: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it goes beside the marker."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


@dataclass(frozen=True, slots=True)
class Orphan:
    """A stream whose gateway is no more, as the node tells of it that keeps it; it is this gateway's by now.

    `permission`: under which it was claimed, and which it goes by.
    """

    origin: Origin
    session: SessionId
    generation: int
    seed: int | None
    node: str
    permission: Permission


def code_of_this() -> str:
    """What must be the same for two gateways to say the same."""
    return version("midstream")


def with_origin(body: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """A body that has a marker, with this beside it."""
    return {**body, FIELD: {**body[FIELD], _NAME: origin.to_json()}}


def origin_in(body: dict[str, Any]) -> Origin | None:
    """What a gateway's request says of its stream, if anything. ValueError says what is wrong with it."""
    fields = body.get(FIELD)
    told = fields.get(_NAME) if isinstance(fields, dict) else None
    return None if told is None else origin_from(told)


def origin_from(told: object) -> Origin:
    """Read one. ValueError says what is wrong with it."""
    if not isinstance(told, dict):
        raise ValueError("stream: expected an object")
    texts = [told.get(name) for name in ("token", "digest", "owner", "code")]
    if not all(isinstance(text, str) and len(text) <= _TEXT_MAX for text in texts):
        raise ValueError("stream: token, digest, owner and code must be short texts")
    token, digest, owner, code = map(str, texts)
    if not is_token(token) or not _DIGEST.fullmatch(digest):
        raise ValueError("stream: token or digest is none")
    return Origin(token, digest, owner, code, told.get("adopts") is True)


@dataclass(frozen=True, slots=True)
class KeptPart:
    """What a node keeps of a gateway's stream: whose, and which session it is there."""

    origin: Origin
    session: SessionId
    generation: int
    seed: int | None

    def to_json(self) -> dict[str, Any]:
        """As a node tells it."""
        return {
            "origin": self.origin.to_json(), "session": self.session, "generation": self.generation, "seed": self.seed,
        }  # fmt: skip


def part_from(told: object) -> KeptPart:
    """Read a node's word. ValueError says what is wrong with it."""
    if not isinstance(told, dict):
        raise ValueError("expected an object")
    generation, seed, session = told.get("generation"), told.get("seed"), told.get("session")
    if type(generation) is not int or not 0 < generation < 1 << 20 or (seed is not None and type(seed) is not int):
        raise ValueError("generation or seed is no number")
    if not isinstance(session, str):
        raise ValueError("session is no id")
    return KeptPart(origin_from(told.get("origin")), session_id(session), generation, seed)


class Adopts(Protocol):
    """Takes streams up whose gateway is no more."""

    def adopt(self, token: str, digest: str) -> "Awaitable[Orphan | str | None]":
        """The stream, which is this gateway's from now on; where it is, if another one was earlier; None: nowhere.

        Raises Refused while nobody can say.
        """
        ...

    def place(self, facts: SessionFacts, orphan: Orphan) -> Placement:
        """Where its session is. Raises Refused when the node has been lost since."""
        ...
