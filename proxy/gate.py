"""Holds the reading of one attempt still, so that what its client has does not grow while the session is handed over.

Invariant: from the moment at which it is closed nothing of the attempt goes to the client, until it is opened again or
the attempt is interrupted. What was read already is kept, and nothing is lost by closing and opening.
"""

import asyncio
from typing import Any


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing goes through."""
        return self._opened is not None

    def close(self) -> None:
        """Let nothing through."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        """Let everything through again."""
        opened, self._opened = self._opened, None
        if opened is not None and not opened.done():
            opened.set_result(None)

    async def passed(self, interrupted: "asyncio.Future[Any]") -> bool:
        """Returns when it is open, or the attempt is interrupted: whether what was read may still be used."""
        while self._opened is not None and not interrupted.done():
            either: set[asyncio.Future[Any]] = {self._opened, interrupted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return not interrupted.done()
