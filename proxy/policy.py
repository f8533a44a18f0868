"""How exact a session has to be: the client's wish, or the deployment's. Pure."""

from collections.abc import Mapping
from enum import StrEnum

from multidict import MultiMapping

HEADER = "X-Midstream-Policy"


class Policy(StrEnum):
    """`exact`: the interrupted run goes on, or the session is refused. `best-effort`: less is done where exact cannot
    be, and named. `off`: the request is passed through."""

    EXACT = "exact"
    BEST_EFFORT = "best-effort"
    OFF = "off"


def policy_of(headers: Mapping[str, str], default: Policy) -> Policy:
    """The policy of one request. ValueError names what is no policy.

    A header that is there several times is one list of all its values, as HTTP has it: two wishes are none.
    """
    several = headers.getall(HEADER, []) if isinstance(headers, MultiMapping) else [headers.get(HEADER)]
    words = list(dict.fromkeys(word.strip().lower() for word in several if word is not None))
    if not words:
        return default
    asked = ", ".join(words)
    try:
        return Policy(asked)
    except ValueError:
        known = ", ".join(Policy)
        raise ValueError(
            f"header {HEADER}: {asked[:40]!r} is no policy; give one of {known}, or leave it out"
        ) from None
