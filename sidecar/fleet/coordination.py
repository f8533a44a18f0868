"""The contract between a fleet and the service that coordinates it.

Owns what a coordination service MUST do, whichever it is: `local.py` (this process alone), `leased.py` over etcd or the
Kubernetes API. `tests/contracts/coordination_suite.py` holds each of them to it.

- A member is *over* when nothing that has its id can send a token any more. That is for good.
- A member that a picture had MUST be in all later ones until it is over. It MAY be there longer.
- While the service does not answer, no member is taken out of the picture for that; the picture says since when it is
  stale.
- Of several who claim a session that was a member's who is over, one MUST win, and have it until it releases it, gives
  it away, or is over itself: a claim expires with its owner and not before.
- A call MUST end within a few times `TRY_S`; with CoordinationError where the service did not say. What was asked may
  have been done then, so it can be asked again.

A member's traffic is one renewal each third of its lease and one write for each change of its record, at most one a
second: it depends neither on sessions nor on the size of the fleet.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ...session.ids import Generation, SessionId
from .record import MemberId, Record

TRY_S = 3.0
# What one member holds at once: a session whose claim is not released by then has been forgotten.
CLAIMS_MAX = 100_000
MEMBERS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the picture has it."""

    id: MemberId
    record: Record
    # Its lease is not at the service any more, but its fence can be open still: nothing is to be taken from it, nor
    # sent to it.
    is_fading: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """All members that are not known to be over."""

    members: Mapping[MemberId, Member]
    # By the clock of `clock.py`: since when nothing is known any more; None while the service answers.
    stale_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A session that one member takes up as its owner of this generation."""

    session: SessionId
    generation: Generation
    owner: MemberId


class Verdict(StrEnum):
    """What came of a claim."""

    WON = "won"
    TAKEN = "taken"  # by a member that is not known to be over; go there
    NOT_OVER = "not-over"  # the member that it would be taken from can still send; wait for the picture


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """`holder` is whoever has the session now, if the verdict is WON or TAKEN."""

    verdict: Verdict
    holder: Claim | None = None


class Membership(ABC):
    """One life of one member. All that asks the service raises LeaseLost once the lease is over for good."""

    id: MemberId

    @abstractmethod
    def may_send(self) -> bool:
        """Whether a token may be written now: the fence is open."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the lease is over for good."""

    @abstractmethod
    async def opened(self) -> bool:
        """Return True once `may_send`, or False when the lease is over for good."""

    @abstractmethod
    def fence_s(self) -> float:
        """The time, by the clock of `clock.py`, at which the fence closes if no renewal is answered any more."""

    @abstractmethod
    def update(self, record: Record) -> None:
        """Have this record told soon; of several within a second only the last is. ValueError when it is unfit."""

    @abstractmethod
    async def lost(self) -> None:
        """Return when the lease is over for good, by `leave` or otherwise."""

    @abstractmethod
    async def claim(self, session: SessionId, generation: Generation, lost: MemberId) -> ClaimAnswer:
        """Take up a session that was a member's who is lost (this one's former self is such a member, too).

        A claim that was won, or given by another, can be asked for again, also with a higher generation.
        CoordinationError when the service did not say; ask again.
        """

    @abstractmethod
    async def give(self, session: SessionId, generation: Generation, to: MemberId) -> None:
        """Let another member have a session from this generation on; send nothing of it any more before that is asked.

        The claim that it leaves is how whoever looks for the session here finds it there. What a member gives to
        itself is its own claim, of that generation. CoordinationError when the service did not say; ask again before
        the other one sends anything.
        """

    @abstractmethod
    async def release(self, session: SessionId) -> None:
        """The session has ended: its claim goes, if there is one. CoordinationError when it may still be there."""

    @abstractmethod
    async def leave(self) -> None:
        """Close the fence, say so, and give the lease back. Never raises: a lease that could not be given back ends."""


class Coordination(ABC):
    """A connection to the coordination service of one fleet."""

    @abstractmethod
    async def join(self, record: Record, lease_s: int) -> Membership:
        """A new member. CoordinationError when the service does not take it; ValueError when the record is unfit."""

    @abstractmethod
    def watch(self) -> AsyncIterator[Picture]:
        """The whole picture, and again after each change; who reads slowly is given the newest. Ends with `close`."""

    @abstractmethod
    async def holder(self, session: SessionId) -> Claim | None:
        """Who has claimed a session, or was given it; None if it never left its first owner. It may be over by now."""

    @abstractmethod
    async def close(self) -> None:
        """End all watches and tasks, and close the fences of who has not left; their leases end by themselves."""
