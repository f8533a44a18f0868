"""How this process stands in its fleet from one moment to the next: who it is there, and what it may send.

Owns the permissions of streams (`proxy/permission.py`) and the claims that go with them. Invariants: a stream goes by
the lease under which it began, and by the next one only once this process has claimed its sessions, as anybody else
would have to; what began before this process was a member was nobody else's at any time, and may always be sent; what
was another's goes by the lease under which it was claimed. What is claimed, also in vain, is released a while after the
stream has ended. It joins and leaves nothing: `fleet_member` does.
"""

import asyncio
import logging
from collections.abc import Iterable

from ..proxy.permission import Always, Permission
from ..session.errors import LeaseLost, MidstreamError
from ..session.ids import Generation, SessionId
from .fleet.coordination import CLAIMS_MAX, Coordination, Membership, Verdict
from .fleet.presence import Presence
from .fleet.record import MemberId

_LOG = logging.getLogger("midstream.fleet")

# All streams of a process ask at once after it has joined again.
_CLAIMS_AT_ONCE = 64
_ASK_AGAIN_S = 0.5
# Until then nothing is kept anywhere any more of what an earlier owner of a session has said.
_RELEASE_AFTER_S = 3600.0
# What the service did not take.
_RELEASE_AGAIN_S = 60.0
# No more claims are held than that, and each is released once.
_RELEASES_MAX = CLAIMS_MAX
_FIRST = Generation(1)


class Standing:
    """One process before one coordination service. `wait_s`: how long a stream waits for a fence to open again."""

    def __init__(self, coordination: Coordination, wait_s: float) -> None:
        self.coordination = coordination
        self._wait_s = wait_s
        self._presence: Presence | None = None
        self._asking = asyncio.Semaphore(_CLAIMS_AT_ONCE)
        self._releases: set[asyncio.Task[None]] = set()
        self._due: dict[SessionId, asyncio.TimerHandle] = {}
        self._has_left = False
        # Set, and another one made, at each change of who this process is.
        self._changed = asyncio.Event()

    def entered(self, presence: Presence) -> None:
        """This process has joined."""
        self._presence = presence

    async def rejoined(self, membership: Membership, former: MemberId) -> None:
        """It is another member now. Each stream claims its own sessions, when it has something to say."""
        _LOG.warning("event=fleet_joined_again member=%s former=%s", membership.id, former)
        self._tell()

    def left(self) -> None:
        """It has left for good."""
        self._has_left = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def membership(self) -> Membership | None:
        """That of the moment; None before the first. It can be lost at any time."""
        return None if self._presence is None else self._presence.membership

    @property
    def id(self) -> MemberId | None:
        """Who this process is in its fleet."""
        return None if self._presence is None else self._presence.membership.id

    def now(self) -> Permission:
        """For a stream that begins now."""
        membership = self.membership
        return Always() if membership is None else Life(self, membership, self._wait_s)

    def claiming(self, membership: Membership, session: SessionId, generation: Generation) -> "Life":
        """For a stream whose session was another's, and is being claimed under that membership."""
        waiting = self._due.pop(session, None)
        if waiting is not None:
            # It was claimed in vain before; now the claim is this stream's to release.
            waiting.cancel()
        life = Life(self, membership, self._wait_s)
        life.cover([session])
        life.claims(generation)
        return life

    async def after(self, lost: Membership) -> Membership | None:
        """The membership after one that was lost; None when there will be none."""
        while not self._has_left:
            changed, membership = self._changed, self.membership
            if membership is not None and membership is not lost and not membership.is_lost:
                return membership
            await changed.wait()
        return None

    async def claimed(self, membership: Membership, session: SessionId, generation: Generation, lost: MemberId) -> bool:
        """Whether a session is this process' still. Raises LeaseLost; waits while the service does not say."""
        while True:
            try:
                async with self._asking:
                    answer = await membership.claim(session, generation, lost)
            except LeaseLost:
                raise
            except MidstreamError:
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            if answer.verdict is not Verdict.NOT_OVER:
                return answer.verdict is Verdict.WON
            await asyncio.sleep(_ASK_AGAIN_S)

    async def recorded(self, membership: Membership, session: SessionId, generation: Generation) -> bool:
        """Returns once the service knows under which generation this process has a session.

        False if the fence closes meanwhile. Raises LeaseLost.
        """
        while membership.may_send():
            try:
                async with self._asking:
                    await membership.give(session, generation, membership.id)
                return True
            except LeaseLost:
                raise
            except MidstreamError:
                await asyncio.sleep(_ASK_AGAIN_S)
        return False

    def release(self, membership: Membership, sessions: Iterable[SessionId], after_s: float | None = None) -> None:
        """These sessions are over: their claims are not needed much longer. Those of no lease any more are swept."""
        if self._has_left:
            return
        wait_s = _RELEASE_AFTER_S if after_s is None else after_s
        for session in sessions:
            waiting = self._due.pop(session, None)
            if waiting is not None:
                waiting.cancel()
            if len(self._due) < _RELEASES_MAX:
                loop = asyncio.get_running_loop()
                self._due[session] = loop.call_later(wait_s, self._release_now, membership, session)

    def _release_now(self, membership: Membership, session: SessionId) -> None:
        self._due.pop(session, None)
        if self._has_left or membership.is_lost:
            # Its claims are swept.
            return
        task = asyncio.create_task(self._release(membership, session), name="fleet-release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, membership: Membership, session: SessionId) -> None:
        try:
            async with self._asking:
                await membership.release(session)
        except MidstreamError as error:
            # While its owner is there nobody sweeps a claim.
            _LOG.info("event=claim_not_released session=%s error=%s", session, error)
            self.release(membership, [session], _RELEASE_AGAIN_S)

    async def close(self) -> None:
        """End the connection to the service."""
        self.left()
        for waiting in self._due.values():
            waiting.cancel()
        self._due.clear()
        for task in tuple(self._releases):
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self.coordination.close()


class Life:
    """What one stream goes by: the lease under which it began, or a later one under which its sessions are claimed."""

    def __init__(self, standing: Standing, membership: Membership, wait_s: float) -> None:
        self._standing = standing
        self._membership = membership
        self._wait_s = wait_s
        self._sessions: tuple[SessionId, ...] = ()
        # Where something may be claimed for it; under a lease before that is swept.
        self._claimed_by: Membership | None = None
        self._generation = _FIRST
        self._taking = asyncio.Lock()
        self.is_over = False
        # Asked for each token: without a call in between.
        self.may_send = membership.may_send

    def cover(self, sessions: Iterable[SessionId]) -> None:
        """The stream's tokens are those of these sessions."""
        self._sessions = tuple(sessions)

    def claims(self, generation: Generation) -> None:
        """They are claimed under the lease that it goes by."""
        self._claimed_by, self._generation = self._membership, generation

    async def record(self, generation: int) -> bool:
        """Have the service know it; asked again for as long as anything may be sent, and a client would wait."""
        try:
            async with asyncio.timeout(self._wait_s):
                while await self.opened():
                    self.claims(Generation(generation))
                    try:
                        if await self._recorded(self._membership):
                            return True
                        await asyncio.sleep(_ASK_AGAIN_S)
                    except LeaseLost:
                        # The next life claims them under that generation.
                        continue
        except TimeoutError:
            pass
        return False

    async def _recorded(self, membership: Membership) -> bool:
        for session in self._sessions:
            if not await self._standing.recorded(membership, session, self._generation):
                return False
        return True

    async def opened(self) -> bool:
        """Returns once its tokens may be sent, or False: they are another's, or nobody has said so for too long."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not self.is_over:
                    if await self._membership.opened():
                        return True
                    await self._take_up()
        except TimeoutError:
            pass
        return False

    async def _take_up(self) -> None:
        """The lease is over: go by the next one, if the sessions are nobody else's by then."""
        async with self._taking:
            lost = self._membership
            if self.is_over or not lost.is_lost:
                return
            following = await self._standing.after(lost)
            if following is None:
                self.is_over = True
                return
            self._claimed_by = following
            try:
                for session in self._sessions:
                    if not await self._standing.claimed(following, session, self._generation, lost.id):
                        _LOG.warning("event=session_taken session=%s former=%s", session, lost.id)
                        self.is_over = True
                        return
            except LeaseLost:
                return
            self._membership, self.may_send = following, following.may_send

    def ended(self) -> None:
        """Nothing is sent of it any more."""
        self.is_over = True
        if self._claimed_by is not None and self._sessions and not self._claimed_by.is_lost:
            self._standing.release(self._claimed_by, self._sessions)
