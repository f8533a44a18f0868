"""Who in a fleet has a stream that is not here.

Only the contract lives here, and what holds for a node that is alone. Invariant: a token's prefix says where its stream
is and nothing of what it is; the token itself is told to nobody but the one that drew it, and to that one by the fleet.
"""

import ssl
from typing import Protocol


class Elsewhere(Protocol):
    """Finds the others of a fleet by the prefixes of their tokens, and knows what comes from them."""

    @property
    def own_prefix(self) -> str:
        """What the tokens that are drawn here begin with: up to 64 of A-Z a-z 0-9 _ -, or "" for none."""
        ...

    @property
    def own_name(self) -> str:
        """Whose the streams are that are begun here: what others have to name to take them up; "" for nobody's."""
        ...

    async def base_url_of(self, prefix: str) -> str | None:
        """Where the one of a prefix takes requests; None if there is none. Bounded in time, never raises."""
        ...

    @property
    def tls(self) -> ssl.SSLContext | None:
        """By which the others are known, and this one to them; None for what the system trusts."""
        ...

    def vouch(self, method: str, target: str, body: bytes) -> str:
        """What proves that one of the fleet passes this on; never the same twice, and text for a header."""
        ...

    def believes(self, method: str, target: str, body: bytes, proof: str, *, shown: bool) -> str:
        """Why a proof is none, for the log; "" if it is one. It holds once.

        `shown`: the connection has shown a certificate of the fleet's authority.
        """
        ...


class Nowhere:
    """A node that is alone."""

    tls = None
    own_name = ""

    @property
    def own_prefix(self) -> str:
        """None is needed."""
        return ""

    async def base_url_of(self, prefix: str) -> str | None:
        """Nobody else has anything."""
        return None

    def vouch(self, method: str, target: str, body: bytes) -> str:
        """There is nobody to pass anything to."""
        return ""

    def believes(self, method: str, target: str, body: bytes, proof: str, *, shown: bool) -> str:
        """Nobody passes anything on to it."""
        return "this node is in no fleet"
