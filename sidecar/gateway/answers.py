"""Reads what nodes answer to the gateway's own questions: all of it, and no more than was agreed."""

import aiohttp

from ..bounded_body import bounded_body


async def bounded_text(answer: aiohttp.ClientResponse, bytes_max: int) -> str:
    """The whole body as text. ValueError when it is too long, or no text."""
    return (await bounded_body(answer.content, bytes_max)).decode()
