"""What a request begins with, as far as others may begin alike. Pure.

Owns the digest by which sessions that share a prefix find the node that has it cached. Invariant: the work is bounded,
however long the request is. It decides nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

# Requests begin alike where so much of them is equal; what is shorter is computed again as quickly as it is found.
BEGINNING_CHARS = 1024
# What comes before the rest in every prompt, then the rest: each API has some of these.
_FIELDS = ("cache_salt", "system", "instructions", "messages", "prompt", "input", "text", "input_ids")
_DEPTH_MAX = 6


def beginning_of(body: Mapping[str, Any]) -> bytes:
    """A digest of the first part of a request's prompt; b"" where the prompt is too short to be worth it."""
    parts: list[str] = []
    left = BEGINNING_CHARS
    for name in _FIELDS:
        if body.get(name) is not None:
            parts.append(name)
        for word in _words(body.get(name), 0):
            parts.append(word[:left])
            left -= len(parts[-1])
            if left <= 0:
                text = "\0".join(parts).encode("utf-8", "surrogatepass")
                return hashlib.blake2b(text, digest_size=16).digest()
    return b""


def _words(value: object, depth: int) -> Iterator[str]:
    """All texts and numbers in a value, in order, one by one."""
    match value:
        case str():
            yield value
        case bool() | None:
            return
        case int():
            # A token stands for some characters of text.
            yield f"{value:04d}"
        case list() if depth < _DEPTH_MAX:
            for item in value:
                yield from _words(item, depth + 1)
        case dict() if depth < _DEPTH_MAX:
            for item in value.values():
                yield from _words(item, depth + 1)
