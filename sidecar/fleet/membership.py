"""One life of one member under a lease: kept up by a task of its own.

Owns the times of renewals and writes, and the member's fence and claims. Invariants: the fence is moved only by an
answered renewal, counted from when it was asked; it is closed for good before anybody is told that the lease is lost;
whatever ends the task closes it. Renewals go on while the service is silent, for the lease may still be there when it
answers again.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...session.errors import CoordinationError, LeaseLost, MidstreamError
from ...session.ids import Generation, SessionId
from .backoff import Backoff
from .clock import Clock
from .coordination import CLAIMS_MAX, TRY_S, Claim, ClaimAnswer, Membership, Verdict
from .fence import Fence
from .informer import Informer
from .lease_service import LeaseService, bounded
from .record import MemberId, Readiness, Record, encode, lease_s_of, with_readiness

_log = logging.getLogger(__name__)

# One write of a record in so many seconds, however often it changes.
WRITE_EVERY_S = 1.0
_RETRY_FIRST_S = 0.1
# Of those who claim the same session at the same time one wins each round.
_ROUNDS_MAX = 8

T = TypeVar("T")


class LeasedMembership(Membership):
    """Made by `LeasedCoordination.join`, which has created the lease at `asked_s`."""

    def __init__(
        self,
        service: LeaseService,
        informer: Informer,
        member: MemberId,
        record: Record,
        fence: Fence,
        asked_s: float,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        self.id = member
        self._service = service
        self._informer = informer
        self._record = record
        self._fence = fence
        self._clock = clock
        self._lease_s = lease_s_of(member)
        self._renew_at_s = asked_s + self._lease_s / 3
        self._pending: str | None = None
        self._written_s = asked_s
        self._backoff = Backoff(_RETRY_FIRST_S, self._lease_s / 6, draw)
        self._claims: dict[SessionId, Claim] = {}
        self._has_changed = asyncio.Event()
        self._is_lost = asyncio.Event()
        # Set, and another one made, when the fence has moved or is lost.
        self._fence_moved = asyncio.Event()
        self._is_silent = False
        self._task = asyncio.create_task(self._keep(), name=f"fleet-member-{member}")

    @property
    def is_lost(self) -> bool:
        """Whether the lease is over for good."""
        return self._fence.is_lost

    def may_send(self) -> bool:
        """Whether a token may be written now."""
        return self._fence.is_open(self._clock())

    async def opened(self) -> bool:
        """Return True once a token may be written, or False when the lease is over for good."""
        while not self._fence.is_lost:
            moved = self._fence_moved
            if self.may_send():
                return True
            await moved.wait()
        return False

    def fence_s(self) -> float:
        """When the fence closes if no renewal is answered any more."""
        return self._fence.until_s

    def update(self, record: Record) -> None:
        """Have this record told soon."""
        if record.name != self._record.name:
            raise ValueError(f"record of {record.name!r}: this member is {self._record.name!r}; join as another")
        entry = encode(record)
        self._record = record
        self._pending = entry
        self._has_changed.set()

    async def lost(self) -> None:
        """Return when the lease is over for good."""
        await self._is_lost.wait()

    async def claim(self, session: SessionId, generation: Generation, lost: MemberId) -> ClaimAnswer:
        """Take up a session that was a member's who is lost."""
        self._require_lease()
        is_over = await self._informer.is_over(lost)
        claim = self._noted(Claim(session, generation, self.id))
        for _ in range(_ROUNDS_MAX):
            held = await self._bounded(self._service.claim(claim) if is_over else self._service.held(session))
            if held is None and not is_over:
                self._claims.pop(session, None)
                return ClaimAnswer(Verdict.NOT_OVER)
            if held is None or held == claim:
                return self._won(claim)
            if held.owner == self.id and held.generation > generation:
                self._claims[session] = held
                return ClaimAnswer(Verdict.TAKEN, held)
            if held.owner != self.id and not await self._informer.is_over(held.owner):
                self._claims.pop(session, None)
                return ClaimAnswer(Verdict.TAKEN, held)
            if await self._bounded(self._service.replace(held, claim)):
                return self._won(claim)
        raise CoordinationError(
            f"session {session}: its claim changed {_ROUNDS_MAX} times while it was asked; ask again"
        )

    async def give(self, session: SessionId, generation: Generation, to: MemberId) -> None:
        """Let another member have a session from this generation on, or have this one's own known."""
        self._require_lease()
        lease_s_of(to)
        claim = Claim(session, generation, to)
        if to == self.id:
            self._noted(claim)
        for _ in range(_ROUNDS_MAX):
            held = await self._bounded(self._service.claim(claim))
            if held is None or held == claim:  # the latter where the answer was lost last time
                self._given(claim)
                return
            if held.owner != self.id:
                raise CoordinationError(
                    f"session {session}: {held.owner} has it by now; it is not this member's to give"
                )
            if await self._bounded(self._service.replace(held, claim)):
                self._given(claim)
                return
        raise CoordinationError(
            f"session {session}: its claim changed {_ROUNDS_MAX} times while it was given; try again"
        )

    async def release(self, session: SessionId) -> None:
        """The session has ended."""
        claim: Claim | None = self._claims.get(session)
        for _ in range(_ROUNDS_MAX):
            if claim is None or claim.owner != self.id or await self._bounded(self._service.replace(claim, None)):
                self._claims.pop(session, None)
                return
            # Another generation is there: one of which nobody said that it was written.
            claim = await self._bounded(self._service.held(session))
        raise CoordinationError(
            f"session {session}: its claim changed {_ROUNDS_MAX} times while it was released; try again"
        )

    async def leave(self) -> None:
        """Close the fence, say so, and give the lease back."""
        was_lost = self._fence.is_lost
        await self.end()
        if not was_lost:
            try:
                entry = encode(with_readiness(self._record, Readiness.LEFT))
                await self._bounded(self._service.write(self.id, entry))
                await self._bounded(self._service.remove(self.id))
            except MidstreamError as error:
                _log.warning("fleet: member=%s could not give its lease back, which ends by itself: %s", self.id, error)

    async def end(self) -> None:
        """Close the fence and stop renewing, telling nobody."""
        self._lose()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        try:
            while True:
                await self._rest()
                try:
                    await self._act()
                    self._backoff.succeeded()
                    if self._is_silent:
                        self._is_silent = False
                        _log.info("fleet: member=%s is renewed again", self.id)
                except LeaseLost as error:
                    _log.warning("fleet: member=%s lost its lease: %s", self.id, error)
                    return
                except MidstreamError as error:
                    if not self._is_silent:
                        self._is_silent = True
                        _log.warning("fleet: member=%s is not renewed: %s", self.id, error)
                    await asyncio.sleep(self._backoff.wait_s())
        except Exception:
            # A defect here must not leave a fence that nobody moves and nobody closes.
            _log.exception("fleet: member=%s cannot be kept", self.id)
        finally:
            self._lose()

    async def _rest(self) -> None:
        """Until something is due."""
        while (left_s := self._due_s() - self._clock()) > 0:
            self._has_changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._has_changed.wait()
            except TimeoutError:
                continue

    def _due_s(self) -> float:
        write_at_s = math.inf if self._pending is None else self._written_s + WRITE_EVERY_S
        return min(self._renew_at_s, write_at_s)

    async def _act(self) -> None:
        asked_s = self._clock()
        if asked_s >= self._renew_at_s:
            # Short enough that there is time for others before the fence closes.
            within_s = min(TRY_S, self._lease_s / 3)
            granted_s = await bounded(self._service.name, self._service.renew(self.id), within_s)
            self._fence.renewed(asked_s, min(granted_s, self._lease_s))
            self._tell_who_waits()
            self._renew_at_s = asked_s + self._lease_s / 3
        elif self._pending is not None:
            entry = self._pending
            self._written_s = asked_s  # a write that fails counts, too
            await self._bounded(self._service.write(self.id, entry))
            if self._pending == entry:
                self._pending = None

    async def _bounded(self, work: Awaitable[T]) -> T:
        return await bounded(self._service.name, work)

    def _require_lease(self) -> None:
        if self._fence.is_lost:
            raise LeaseLost(f"{self.id}: its lease is over; join again and claim what was its own")

    def _noted(self, claim: Claim) -> Claim:
        """Also of a claim of which nobody said that it was written `release` must know."""
        if claim.session not in self._claims:
            if len(self._claims) >= CLAIMS_MAX:
                raise CoordinationError(
                    f"{self.id} holds {CLAIMS_MAX} claims, and no more are kept; release those of sessions that ended"
                )
            self._claims[claim.session] = claim
        return claim

    def _given(self, claim: Claim) -> None:
        if claim.owner == self.id:
            self._claims[claim.session] = claim
        else:
            self._claims.pop(claim.session, None)

    def _won(self, claim: Claim) -> ClaimAnswer:
        self._require_lease()  # it can have been lost while the service was asked
        self._claims[claim.session] = claim
        return ClaimAnswer(Verdict.WON, claim)

    def _lose(self) -> None:
        if not self._fence.is_lost:
            self._fence.lose()
            self._informer.forget(self.id)
            self._is_lost.set()
            self._tell_who_waits()

    def _tell_who_waits(self) -> None:
        self._fence_moved.set()
        self._fence_moved = asyncio.Event()
