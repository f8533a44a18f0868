"""Reads a body that somebody else sends: all of it, and no more than was agreed."""

import aiohttp


async def bounded_body(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """The whole body. ValueError when it is longer; what it costs in time is its caller's to bound."""
    parts: list[bytes] = []
    size_bytes = 0
    while part := await content.readany():
        size_bytes += len(part)
        if size_bytes > bytes_max:
            raise ValueError(f"more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)
