"""How requests of a fleet's gateways prove themselves by a secret that all share.

Owns the header's value; what is signed, and for how long it holds, is `signatures.py`'s. Standard library and session
only.
"""

import secrets
import time
from collections.abc import Callable, Mapping

from ...proxy.fleet import Unproven
from ...proxy.headers import FLEET
from ..replicas.signatures import Claim, NotSigned, Verifier, authorization, body_sha256


class SecretProver:
    """A gateway's side."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def headers(self, method: str, target: str, body: bytes) -> Mapping[str, str]:
        """The proof of one request."""
        once = secrets.token_hex(16)
        return {FLEET: authorization(self._secret, method, target, body, now_s=time.time(), once=once)}


class SecretBeliever:
    """A node's side."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._verifier = Verifier(secret)
        self._clock = clock

    def check(self, method: str, target: str, header: str) -> "SecretClaimed":
        """Raises Unproven unless it was signed, just now, and for the first time."""
        try:
            return SecretClaimed(self._verifier.check(method, target, header, now_s=self._clock()))
        except NotSigned as error:
            raise Unproven(str(error)) from None


class SecretClaimed:
    """A request whose signature is good."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def require(self, body: bytes) -> None:
        """Raises Unproven unless this is the body that was signed."""
        if self._claim.body_bytes != len(body) or self._claim.body_sha256 != body_sha256(body):
            raise Unproven("the body is not the one that was signed")
