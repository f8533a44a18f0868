"""How this process stands in its fleet from one moment to the next: who it is there, and what it may send.

Owns the permissions of streams (`proxy/permission.py`). Invariants: a stream goes by the lease under which it began,
and by no later one; what began before this process was a member was nobody else's at any time, and may always be sent.
It joins and leaves nothing: `fleet_member` does.
"""

import asyncio

from ..proxy.permission import Always, Permission
from .fleet.coordination import Coordination, Membership
from .fleet.presence import Presence
from .fleet.record import MemberId


class Standing:
    """One process before one coordination service. `wait_s`: how long a stream waits for a fence to open again."""

    def __init__(self, coordination: Coordination, wait_s: float) -> None:
        self.coordination = coordination
        self._wait_s = wait_s
        self._presence: Presence | None = None

    def entered(self, presence: Presence) -> None:
        """This process has joined."""
        self._presence = presence

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
        return Always() if membership is None else Life(membership, self._wait_s)

    async def close(self) -> None:
        """End the connection to the service."""
        await self.coordination.close()


class Life:
    """What streams go by that began in one life of a member."""

    def __init__(self, membership: Membership, wait_s: float) -> None:
        self._membership = membership
        self._wait_s = wait_s
        # Asked for each token: without a call in between.
        self.may_send = membership.may_send

    @property
    def is_over(self) -> bool:
        """Whether the lease is over for good."""
        return self._membership.is_lost

    async def opened(self) -> bool:
        """Returns once the fence is open, or False: the lease is over, or nobody has renewed it for too long."""
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._membership.opened()
        except TimeoutError:
            return False
