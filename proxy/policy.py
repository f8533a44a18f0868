"""How exact a session has to be: the client's wish, or the deployment's. Pure."""

from collections.abc import Mapping
from enum import StrEnum

HEADER = "X-Midstream-Policy"


class Policy(StrEnum):
    """`exact`: the interrupted run goes on, or the session is refused. `best-effort`: less is done where exact cannot
    be, and named. `off`: the request is passed through."""

    EXACT = "exact"
    BEST_EFFORT = "best-effort"
    OFF = "off"


def policy_of(headers: Mapping[str, str], default: Policy) -> Policy:
    """The policy of one request. ValueError names what is no policy."""
    asked = headers.get(HEADER)
    if asked is None:
        return default
    try:
        return Policy(asked.strip().lower())
    except ValueError:
        known = ", ".join(Policy)
        raise ValueError(
            f"header {HEADER}: {asked[:40]!r} is no policy; give one of {known}, or leave it out"
        ) from None
