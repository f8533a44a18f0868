"""Who in a fleet has a stream that is not here.

Only the contract lives here, and what holds for a node that is alone. Invariant: a token's prefix says where its stream
is and nothing of what it is; the token itself is told to nobody but the node that drew it.
"""

from typing import Protocol


class Elsewhere(Protocol):
    """Finds the nodes of a fleet by the prefixes of their tokens."""

    @property
    def own_prefix(self) -> str:
        """What the tokens that are drawn here begin with: up to 64 of A-Z a-z 0-9 _ -, or "" for none."""
        ...

    async def base_url_of(self, prefix: str) -> str | None:
        """Where the node of a prefix takes requests; None if there is no such node. Bounded in time, never raises."""
        ...


class Nowhere:
    """A node that is alone."""

    @property
    def own_prefix(self) -> str:
        """None is needed."""
        return ""

    async def base_url_of(self, prefix: str) -> str | None:
        """Nobody else has anything."""
        return None
