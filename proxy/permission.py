"""Whether the tokens of a stream may be written now.

Only the contract lives here, what holds where nobody could take a session over, and the wait for a permission that is
withheld. Invariant: what was once refused for good stays so: whoever has the sessions then may be writing their tokens.
It writes nothing: `fenced` and `stream_reader` ask here before they do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from ..session.ids import SessionId


class Permission(Protocol):
    """What one stream goes by, from its first event to its last."""

    def may_send(self) -> bool:
        """Whether tokens may be written now. Asked for each of them."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether they never may be again."""
        ...

    async def opened(self) -> bool:
        """Returns once they may be written, or False: never, or not within any time that a client would wait."""
        ...

    def cover(self, sessions: Iterable[SessionId]) -> None:
        """The stream's tokens are those of these sessions."""
        ...

    async def record(self, generation: int) -> bool:
        """Have the fleet know under which generation the sessions go on, before anything of it is sent.

        So whoever takes them up from this process never does with what an owner before that one had. False when this
        process may not send any more, or nobody has said that it is known for as long as a client would wait.
        """
        ...

    def ended(self) -> None:
        """Nothing is written of it any more."""
        ...


class Permits(Protocol):
    """Gives each stream the permission that it goes by."""

    def now(self) -> Permission:
        """For a stream that begins now."""
        ...


class Always:
    """Nobody could take a session from this process."""

    is_over = False

    def may_send(self) -> bool:
        """There is no fence."""
        return True

    async def opened(self) -> bool:
        """There is nothing to wait for."""
        return True

    def cover(self, sessions: Iterable[SessionId]) -> None:
        """Whose they are is nobody's question."""

    async def record(self, generation: int) -> bool:
        """Nobody wants to know."""
        return True

    def ended(self) -> None:
        """Nothing was held."""

    def now(self) -> Permission:
        """The same for all streams."""
        return self


class NotPermitted(ConnectionError):
    """A stream is broken off, for its session is another's by now. To who writes it, its client has left."""


async def wait_for(permission: Permission, say_so: Callable[[], Awaitable[None]], every_s: float) -> bool:
    """Wait until tokens may be written, and tell the client now and then; False where they never may.

    ConnectionError when it leaves meanwhile.
    """
    while not permission.may_send():
        opening = asyncio.ensure_future(permission.opened())
        try:
            while not (await asyncio.wait({opening}, timeout=every_s))[0]:
                await say_so()
            if not opening.result():
                return False
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
    return True
