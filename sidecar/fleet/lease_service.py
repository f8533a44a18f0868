"""What a service with leases must be able to do, below `leased.py`: single tries, and the stream of what changes.

Owns the contract of the backends (`etcd.py`, `kubernetes.py`). They decide nothing about time: who counts which lease
from when is `roster.py`, when to try again is `membership.py` and `informer.py`.

Every call is one try, which `bounded` ends after `TRY_S`. It raises LeaseLost only when the lease is surely over,
ConfigError when the service will not do it however often it is asked, and CoordinationError when it was not done or
nobody knows.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from ...session.errors import CoordinationError
from ...session.ids import SessionId
from .coordination import TRY_S, Claim
from .record import MemberId

T = TypeVar("T")

SWEEP_MAX = 20_000


class Renewals(Enum):
    """Who sees renewals."""

    UNSEEN = auto()  # the service alone, which takes a member away when its lease is over
    SEEN = auto()  # all who follow: each renewal is an entry, and they take away whose renewals have ended


@dataclass(frozen=True, slots=True)
class Entry:
    """A member's record as text, and the mark of the very version of it that was seen (for `bury`)."""

    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """All entries that there are. What was known before and is not among them has gone."""

    entries: Mapping[MemberId, Entry]


@dataclass(frozen=True, slots=True)
class Put:
    """A member's record was written, or its lease renewed where that is seen."""

    member: MemberId
    entry: Entry


@dataclass(frozen=True, slots=True)
class Gone:
    """A member's entry is not there any more."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class Current:
    """The service has just answered: what was told so far is all."""


Change = Whole | Put | Gone | Current


class LeaseService(ABC):
    """One fleet in a service with leases."""

    name: str
    renewals: Renewals

    @abstractmethod
    async def create(self, member: MemberId, entry: str) -> float:
        """A lease and an entry for a member that never had one; returns the seconds that were granted."""

    @abstractmethod
    async def renew(self, member: MemberId) -> float:
        """Renew, and see that the entry is there; returns the seconds that were granted, counted from the call on."""

    @abstractmethod
    async def write(self, member: MemberId, entry: str) -> None:
        """Change the entry of a member whose lease is not over."""

    @abstractmethod
    async def remove(self, member: MemberId) -> None:
        """Take away lease and entry; nothing happens where there are none."""

    @abstractmethod
    async def is_there(self, member: MemberId) -> bool:
        """Whether the member has an entry, as a quorum has it now."""

    @abstractmethod
    async def bury(self, member: MemberId, mark: str) -> bool:
        """Take away a member that was not seen renewed for a lease; False if its entry is not the very one of `mark`.

        So it is, too, where there is none any more: it can have been renewed, unseen as yet, before somebody else took
        it away. Only where renewals are SEEN.
        """

    @abstractmethod
    async def claim(self, claim: Claim) -> Claim | None:
        """Write the claim if nobody has one on this session, and return None; else the one that is there."""

    @abstractmethod
    async def held(self, session: SessionId) -> Claim | None:
        """The claim on this session, if there is one."""

    @abstractmethod
    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        """Put a claim, or none, in the place of exactly this one; False when it is not there (any more)."""

    @abstractmethod
    async def claims(self) -> list[Claim]:
        """All claims, for a sweep; the first `SWEEP_MAX` of them if there are more."""

    @abstractmethod
    def follow(self, every_s: float) -> AsyncIterator[Change]:
        """First `Whole`, then each change in order, and `Current` at least every `every_s` + `TRY_S`.

        Raises CoordinationError when it cannot be sure that nothing was missed; it is called again then.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""


async def bounded(name: str, work: Awaitable[T], within_s: float = TRY_S) -> T:
    """The result of a call of the service of this name. CoordinationError when it takes longer."""
    try:
        async with asyncio.timeout(within_s):
            return await work
    except TimeoutError:
        raise CoordinationError(f"{name}: no answer within {within_s:g} s; is it up, and reached from here?") from None
