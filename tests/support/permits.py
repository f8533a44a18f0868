"""Permissions to send that a test gives, withholds and takes away."""

import asyncio
from collections.abc import Iterable

from midstream.proxy.permission import Permission
from midstream.session.ids import SessionId


class Life:
    """One life of a member. `asked`: how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.ends = 0
        self.sessions: list[SessionId] = []
        self.recorded: list[int] = []
        self.may_record = asyncio.Event()
        self.may_record.set()
        self.is_over = False
        self._may = True
        self._changed = asyncio.Event()

    def may_send(self) -> bool:
        """As the test has it."""
        self.asked += 1
        return self._may and not self.is_over

    async def opened(self) -> bool:
        """Waits for the test."""
        while not self.is_over:
            if self._may:
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    def cover(self, sessions: Iterable[SessionId]) -> None:
        """Note whose they are."""
        self.sessions += sessions

    async def record(self, generation: int) -> bool:
        """Note it, when the test lets it be known."""
        await self.may_record.wait()
        self.recorded.append(generation)
        return not self.is_over

    def ended(self) -> None:
        """Note it."""
        self.ends += 1

    def close(self) -> None:
        """Nothing may be sent for now."""
        self._may = False

    def open(self) -> None:
        """It may again."""
        self._may = True
        self._changed.set()

    def lose(self) -> None:
        """It never may again."""
        self.is_over = True
        self._changed.set()


class Lives:
    """The permissions of one process: those of its life of the moment."""

    def __init__(self) -> None:
        self.life = Life()

    def now(self) -> Permission:
        """For a stream that begins now."""
        return self.life
