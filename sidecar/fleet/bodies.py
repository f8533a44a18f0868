"""Answers of a service, whole or a line at a time, never more of them than is bounded.

Owns the bound, `ANSWER_BYTES_MAX`: what a fleet of `MEMBERS_MAX` members comes to is well below it.
"""

from collections.abc import AsyncIterator

import aiohttp

from ...session.errors import CoordinationError
from ..bounded_body import bounded_body

ANSWER_BYTES_MAX = 64 << 20


async def whole(content: aiohttp.StreamReader) -> bytes:
    """All of a body. CoordinationError when it is too long."""
    try:
        return await bounded_body(content, ANSWER_BYTES_MAX)
    except ValueError as error:
        raise CoordinationError(f"answered {error}; what else lies in the fleet's place?") from None


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body as they end, which may be longer than those that the reader itself takes."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in content.iter_any():
        *ended, rest = part.split(b"\n")
        for end in ended:
            yield b"".join([*parts, end])
            parts, size_bytes = [], 0
        if rest:
            parts.append(rest)
            size_bytes += len(rest)
        if size_bytes > ANSWER_BYTES_MAX:
            raise CoordinationError(f"answered a line of more than {ANSWER_BYTES_MAX} bytes; is this the service?")
