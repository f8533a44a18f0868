"""How a request between nodes proves that a holder of the fleet's secret has made it, just now, and only once.

Owns the signed text, the window of time and the memory of what was seen in it. Invariant: `Verifier.check` returns only
for a request whose method, target, time, once-number, body length and body hash were signed with the secret, whose time
is near, and which was not seen before; what it remembers is bounded, and when that is full it refuses. It says what the
body's hash must be before the body is read. Pure: time and once-numbers are arguments.

    Authorization: Midstream-1 <milliseconds since 1970>:<once, 32 digits>:<body length>:<SHA-256 of the body>:<HMAC>
"""

import hashlib
import hmac
import re
from collections import OrderedDict
from dataclasses import dataclass

SECRET_BYTES_MIN = 16
WINDOW_S = 30.0
# Requests in two windows; an honest fleet stays far below, for a request is a chunk or a question about many.
SEEN_MAX = 262_144
_SCHEME = "Midstream-1 "
_FIELDS = re.compile(r"([0-9]{1,15}):([0-9a-f]{32}):([0-9]{1,12}):([0-9a-f]{64}):([0-9a-f]{64})")


class NotSigned(Exception):
    """Not to be believed. The text is for this side's log, never for who asked."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request that is to be believed says of its body."""

    body_bytes: int
    body_sha256: str


def body_sha256(body: bytes | memoryview) -> str:
    """The hash of a body as it is signed."""
    return hashlib.sha256(body).hexdigest()


def authorization(secret: bytes, method: str, target: str, body: bytes | memoryview, *, now_s: float, once: str) -> str:
    """The value of the header for one request; `once` are 32 random hex digits that are never used again."""
    claim = Claim(len(body), body_sha256(body))
    time_ms = int(now_s * 1000)
    return (
        f"{_SCHEME}{time_ms}:{once}:{claim.body_bytes}:{claim.body_sha256}:"
        f"{_mac(secret, method, target, time_ms, once, claim)}"
    )


class Verifier:
    """Checks requests that were signed with one secret.

    One that has just started has seen nothing yet: it believes nothing that was signed before `not_before_s`.
    """

    def __init__(self, secret: bytes, *, not_before_s: float = 0.0) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"a secret of {len(secret)} bytes is too short; use {SECRET_BYTES_MIN} or more")
        self._secret = secret
        self._not_before_s = not_before_s
        # When each may be forgotten; in the order of arrival.
        self._seen: OrderedDict[str, float] = OrderedDict()

    def check(self, method: str, target: str, header: str | None, *, now_s: float) -> Claim:
        """What the request says of its body; NotSigned when it is not to be believed."""
        found = _FIELDS.fullmatch((header or "").removeprefix(_SCHEME))
        if found is None or not (header or "").startswith(_SCHEME):
            raise NotSigned("no credential")
        time_ms, once = int(found[1]), found[2]
        claim = Claim(int(found[3]), found[4])
        expected = _mac(self._secret, method, target, time_ms, once, claim)
        if not hmac.compare_digest(expected, found[5]):
            raise NotSigned("it was signed with another secret, or changed since")
        if abs(now_s - time_ms / 1000) > WINDOW_S:
            raise NotSigned(f"its time is {now_s - time_ms / 1000:.0f} s off; set the clocks of all nodes")
        if time_ms / 1000 < self._not_before_s:
            raise NotSigned("it was signed before this process began")
        self._forget(now_s)
        if once in self._seen:
            raise NotSigned("it was sent before")
        if len(self._seen) >= SEEN_MAX:
            raise NotSigned(f"more than {SEEN_MAX} requests in {2 * WINDOW_S:.0f} s")
        self._seen[once] = now_s + 2 * WINDOW_S
        return claim

    def _forget(self, now_s: float) -> None:
        while self._seen:
            once, until_s = next(iter(self._seen.items()))
            if until_s > now_s:
                return
            del self._seen[once]


def _mac(secret: bytes, method: str, target: str, time_ms: int, once: str, claim: Claim) -> str:
    text = f"midstream-1\n{method}\n{target}\n{time_ms}\n{once}\n{claim.body_bytes}\n{claim.body_sha256}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
