"""What the proxy needs to be part of a fleet: on a node, whose markers it believes; in a gateway, how it proves itself.

Only the contract: secrets and clocks are the sidecar's. Invariant: a marker is read only from a request that proved
where it comes from; one that fails to is refused, and never taken for a client's.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from ..session.marker import FIELD, NAME, Marker


class Unproven(Exception):
    """A request that claims to be the fleet's, and is not to be believed. The text is for the log."""


class Believer(Protocol):
    """A node's side."""

    def check(self, method: str, target: str, header: str, body: bytes) -> None:
        """Raises Unproven unless one of the fleet has sent exactly this, just now, and for the first time."""
        ...


class Prover(Protocol):
    """A gateway's side."""

    def headers(self, method: str, target: str, body: bytes) -> Mapping[str, str]:
        """What proves one request; never the same twice."""
        ...


def marker_in(body: dict[str, Any]) -> Marker:
    """The marker of a gateway's request. ValueError says what is wrong with it."""
    fields = body.get(FIELD)
    return Marker.from_json(fields.get(NAME) if isinstance(fields, dict) else None)
