"""What a source of notices is. Pure.

A source MUST tell the present state of things, whenever that may be otherwise, and MUST raise a NoticeError where it
cannot know it: silence is no all-clear. It decides nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...session.errors import MidstreamError


class NoticeError(MidstreamError):
    """A source does not answer, or not in words that are known; the text says fact and remedy."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine is to be left. `text` stays the same as long as the notice does; `in_s`: when, if that is told."""

    text: str
    in_s: float | None = None


# Told what is announced now; None: nothing.
Tell = Callable[[Notice | None], None]


class Source(Protocol):
    """One who announces."""

    name: str

    async def follow(self, tell: Tell) -> None:
        """Tell until cancelled. Raises NoticeError."""
        ...
