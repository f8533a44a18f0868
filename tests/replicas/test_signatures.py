"""What proves a request, and what does not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.replicas.signatures import (
    SEEN_MAX,
    WINDOW_S,
    NotSigned,
    Verifier,
    authorization,
    body_sha256,
)

SECRET = b"s" * 32
ONCE = "0123456789abcdef" * 2
NOW = 1_700_000_000.0


def header(**changes: object) -> str:
    asked = {"method": "PUT", "target": "/chunks/x?draft=1", "body": b"bytes", "now_s": NOW, "once": ONCE} | changes
    return authorization(SECRET, asked.pop("method"), asked.pop("target"), asked.pop("body"), **asked)  # type: ignore[arg-type]


def test_what_was_signed_is_believed_and_says_what_its_body_must_be() -> None:
    claim = Verifier(SECRET).check("PUT", "/chunks/x?draft=1", header(), now_s=NOW + 1)
    assert (claim.body_bytes, claim.body_sha256) == (5, body_sha256(b"bytes"))


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/chunks/x?draft=1"), ("PUT", "/chunks/y?draft=1"), ("PUT", "/chunks/x?draft=2")]
)
def test_a_credential_is_good_for_its_own_method_and_target_alone(method: str, target: str) -> None:
    with pytest.raises(NotSigned):
        Verifier(SECRET).check(method, target, header(), now_s=NOW)


def test_a_request_is_believed_once() -> None:
    verifier = Verifier(SECRET)
    verifier.check("PUT", "/chunks/x?draft=1", header(), now_s=NOW)
    for later_s in (0, 1, WINDOW_S - 0.001):
        with pytest.raises(NotSigned, match="before"):
            verifier.check("PUT", "/chunks/x?draft=1", header(), now_s=NOW + later_s)
    with pytest.raises(NotSigned, match="off"):
        verifier.check("PUT", "/chunks/x?draft=1", header(), now_s=NOW + WINDOW_S + 1)


@given(st.floats(-WINDOW_S, WINDOW_S), st.floats(0, 4 * WINDOW_S))
def test_no_clock_within_the_window_lets_a_request_in_twice(skew_s: float, later_s: float) -> None:
    verifier = Verifier(SECRET)
    sent = header(now_s=NOW + skew_s)
    verifier.check("PUT", "/chunks/x?draft=1", sent, now_s=NOW)
    with pytest.raises(NotSigned):
        verifier.check("PUT", "/chunks/x?draft=1", sent, now_s=NOW + later_s)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_flipped_byte_of_a_credential_is_believed(at: int, bits: int) -> None:
    sent = bytearray(header().encode())
    sent[at % len(sent)] ^= bits
    with pytest.raises(NotSigned):
        Verifier(SECRET).check("PUT", "/chunks/x?draft=1", sent.decode("latin-1"), now_s=NOW)


@pytest.mark.parametrize("sent", [None, "", "Midstream-1 ", "Bearer x", header()[12:], header() + "0", header() + "\n"])
def test_what_is_no_credential_is_none(sent: str | None) -> None:
    with pytest.raises(NotSigned):
        Verifier(SECRET).check("PUT", "/chunks/x?draft=1", sent, now_s=NOW)


def test_another_secret_is_none_and_leaves_no_trace() -> None:
    verifier = Verifier(b"t" * 32)
    with pytest.raises(NotSigned, match="another secret"):
        verifier.check("PUT", "/chunks/x?draft=1", header(), now_s=NOW)
    # Who has no secret cannot fill the memory of what was seen.
    assert not verifier._seen


def test_what_is_remembered_is_bounded_and_full_means_no() -> None:
    verifier = Verifier(SECRET)
    for number in range(SEEN_MAX):
        verifier._seen[f"{number:032x}"] = NOW + 1
    with pytest.raises(NotSigned, match="more than"):
        verifier.check("PUT", "/chunks/x?draft=1", header(), now_s=NOW)
    verifier.check("PUT", "/chunks/x?draft=1", header(now_s=NOW + 2), now_s=NOW + 2)
    assert len(verifier._seen) == 1


def test_what_was_signed_before_a_process_began_is_not_believed_by_it() -> None:
    verifier = Verifier(SECRET, not_before_s=NOW)
    with pytest.raises(NotSigned, match="before this process"):
        verifier.check("PUT", "/chunks/x?draft=1", header(now_s=NOW - 0.5), now_s=NOW + 1)
    verifier.check("PUT", "/chunks/x?draft=1", header(now_s=NOW + 0.5), now_s=NOW + 1)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        Verifier(b"short")


def test_the_secret_is_nowhere_in_the_header() -> None:
    assert not re.search("ssss", header())
