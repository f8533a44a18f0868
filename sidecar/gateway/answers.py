"""Reads what nodes answer to the gateway's own questions: all of it, and no more than was agreed."""

import aiohttp


async def bounded_text(answer: aiohttp.ClientResponse, bytes_max: int) -> str:
    """The whole body as text. ValueError when it is too long, or no text."""
    parts = bytearray()
    while data := await answer.content.readany():
        parts += data
        if len(parts) > bytes_max:
            raise ValueError(f"more than {bytes_max} bytes")
    return parts.decode()
