"""How requests of a fleet's members prove themselves: by a secret that all share, or by certificates.

Owns the header's value; what is signed, and for how long it holds, is `signatures.py`'s. Invariant: where there is a
secret each request is signed, whatever the connection shows; where there is none, only what came over a connection that
showed a certificate of the fleet's authority is believed.
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

    def headers(self, method: str, target: str, body: bytes) -> Mapping[str, str]:
        """The proof of one request."""
        once = secrets.token_hex(16)
        return {FLEET: authorization(self._secret, method, target, body, now_s=time.time(), once=once)}


class SecretBeliever:
    """Who is asked, with a secret."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._verifier = Verifier(secret)
        self._clock = clock

    def check(self, method: str, target: str, header: str, *, shown: bool = False) -> "SecretClaimed":
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


# What a request bears that its connection vouches for.
_SHOWN = "certificate"


class CertificateProver:
    """Who asks, with a certificate: its connection proves it."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls: ssl.SSLContext | None = tls

    def headers(self, method: str, target: str, body: bytes) -> Mapping[str, str]:
        """That the fleet asks, and not a client of it."""
        return {FLEET: _SHOWN}


class CertificateBeliever:
    """Who is asked, with certificates alone."""

    def check(self, method: str, target: str, header: str, *, shown: bool = False) -> "CertificateClaimed":
        """Raises Unproven unless its connection has shown one."""
        if not shown or header != _SHOWN:
            raise Unproven(
                "its connection has shown no certificate of the fleet: it is to come by TLS, at fleet.listen"
            )
        return CertificateClaimed()


class CertificateClaimed:
    """A request of a connection that is good: so is all that comes by it."""

    def require(self, body: bytes) -> None:
        """It is."""
