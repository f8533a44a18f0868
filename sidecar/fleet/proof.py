"""How requests of a fleet's members prove themselves: by a secret that all share, or by certificates.

Owns the header's value; what is signed, and for how long it holds, is `signatures.py`'s. Invariants: where there is a
secret each request is signed, whatever the connection shows; where there is none, only what came over a connection that
showed a certificate of the fleet's authority is believed. The name of the header is signed, too: whoever sees a proof
go by can put it to no other use.
"""

import secrets
import ssl
import time
from collections.abc import Callable, Mapping

from ...proxy.fleet import Unproven
from ...proxy.headers import FLEET
from ..replicas.signatures import Claim, NotSigned, Verifier, authorization, body_sha256


class SecretProver:
    """Who asks, with a secret."""

    def __init__(self, secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        self._secret = secret
        self.tls = tls

    def headers(self, method: str, target: str, body: bytes, *, name: str = FLEET) -> Mapping[str, str]:
        """The proof of one request, under that name."""
        once, act = secrets.token_hex(16), _act(name, method)
        return {name: authorization(self._secret, act, target, body, now_s=time.time(), once=once)}


class SecretBeliever:
    """Who is asked, with a secret."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time, *, not_before_s: float = 0.0) -> None:
        self._verifier = Verifier(secret, not_before_s=not_before_s)
        self._clock = clock

    def check(
        self, method: str, target: str, header: str, *, shown: bool = False, name: str = FLEET
    ) -> "SecretClaimed":
        """Raises Unproven unless it was signed under that name, just now, and for the first time."""
        try:
            return SecretClaimed(self._verifier.check(_act(name, method), target, header, now_s=self._clock()))
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


def _act(name: str, method: str) -> str:
    return f"{name} {method}"


# What a request bears that its connection vouches for.
_SHOWN = "certificate"


class CertificateProver:
    """Who asks, with a certificate: its connection proves it."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls: ssl.SSLContext | None = tls

    def headers(self, method: str, target: str, body: bytes, *, name: str = FLEET) -> Mapping[str, str]:
        """That the fleet asks, and not a client of it."""
        return {name: _SHOWN}


class CertificateBeliever:
    """Who is asked, with certificates alone."""

    def check(
        self, method: str, target: str, header: str, *, shown: bool = False, name: str = FLEET
    ) -> "CertificateClaimed":
        """Raises Unproven unless its connection has shown one."""
        if not shown or header != _SHOWN:
            raise Unproven(
                "its connection has shown no certificate of the fleet: it is to come by TLS, at fleet.listen"
            )
        return CertificateClaimed()


class CertificateClaimed:
    """A request of a connection that is good: so is all that comes by it."""

    def require(self, body: bytes) -> None:
        """Nothing more is asked: who has shown a certificate has sent all of it."""
