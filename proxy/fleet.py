"""What the proxy needs to be part of a fleet: on a node, whose markers it believes; in a gateway, how it proves itself.

Owns what the two say to each other besides requests and answers: the marker's place, a node's words on its own
takeovers, and which of its answers mean that it has not begun. Invariant: a marker is read only from a request that
proved where it comes from; one that fails to is refused, and never taken for a client's. Secrets and clocks are the
sidecar's.
"""

import asyncio
import logging
import re
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from ..session.marker import FIELD, NAME, Marker
from .coordinator import Reason
from .headers import FLEET, PROBLEM
from .problems import NOT_EXACT
from .sse import encode_comment

_LOG = logging.getLogger("midstream.fleet")

# What a gateway may add to a client's body: a marker with some hundred thousand outputs.
MORE_BYTES = 8 << 20
_SAY_AGAIN_S = 60.0
_STRANGERS_MAX = 256
_TAKEOVERS = re.compile(rb"\A: midstream takeovers=(\d{1,9})\s*\Z")


class Unproven(Exception):
    """A request that claims to be the fleet's, and is not to be believed. The text is for the log."""


class Claimed(Protocol):
    """A request whose head has proved itself."""

    def require(self, body: bytes) -> None:
        """Raises Unproven unless this is the body that was vouched for."""
        ...


class Believer(Protocol):
    """A node's side."""

    def check(self, method: str, target: str, header: str, *, shown: bool = False, name: str = FLEET) -> Claimed:
        """Raises Unproven unless one of the fleet has sent this, just now, for the first time, and under that name.

        `name`: of the header that bears it; what proves a question that is passed on proves no gateway's request.
        `shown`: its connection has shown a certificate of the fleet's authority.
        """
        ...


class Prover(Protocol):
    """A gateway's side, or that of whoever asks another for its client's sake."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """By which the others are known, and this one to them; None for what the system trusts."""
        ...

    def headers(self, method: str, target: str, body: bytes, *, name: str = FLEET) -> Mapping[str, str]:
        """What proves one request; never the same twice."""
        ...


def shows_certificate(transport: asyncio.BaseTransport | None) -> bool:
    """Whether whoever is at the other end has shown a certificate that was checked: only fleets' ports ask for any."""
    return transport is not None and bool(transport.get_extra_info("peercert"))


class Strangers:
    """Tells the log of requests that were not believed: of each address once in a while, for some come every second."""

    def __init__(self) -> None:
        self._told_s: OrderedDict[str, float] = OrderedDict()

    def tell(self, remote: str | None, why: str, now_s: float) -> None:
        """A request from `remote` was not believed."""
        key = remote or "-"
        if now_s - self._told_s.get(key, now_s - _SAY_AGAIN_S) < _SAY_AGAIN_S:
            return
        self._told_s[key] = now_s
        self._told_s.move_to_end(key)
        if len(self._told_s) > _STRANGERS_MAX:
            self._told_s.popitem(last=False)
        _LOG.warning("event=not_of_the_fleet remote=%s why=%s", key, why)


def has_marker(body: dict[str, Any]) -> bool:
    """Whether a gateway's request is a session's; of the others a node makes what it makes of any client's."""
    return FIELD in body


def marker_in(body: dict[str, Any]) -> Marker:
    """The marker of a gateway's request. ValueError says what is wrong with it."""
    fields = body.get(FIELD)
    return Marker.from_json(fields.get(NAME) if isinstance(fields, dict) else None)


def takeovers_comment(count: int) -> bytes:
    """A node's word that what follows comes after its takeover of that number, whatever that will have come to."""
    return encode_comment(f"midstream takeovers={count}")


def takeovers_in(comment: bytes) -> int | None:
    """The number in such a comment, if it is one."""
    found = _TAKEOVERS.match(comment)
    return None if found is None else int(found[1])


def why_not_begun(status: int, told: Mapping[str, str]) -> Reason | None:
    """Why a node's answer is no answer to the client, or None if it is one.

    What it says of itself bears its mark. A 503 without that is of something before it, or of its last connection.
    """
    code = told.get(PROBLEM)
    if status == 422 and code == NOT_EXACT:
        return Reason.NOT_EXACT
    if status == 503 or (status == 401 and code is not None):
        return Reason.TURNED_AWAY
    return Reason.ENGINE_ERROR if status == 502 and code is not None else None
