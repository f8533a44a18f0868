"""A fleet whose members hold leases in a service: etcd, or the Kubernetes API.

Owns what one process has of it: one follower, its memberships, and the sweep of claims whose owners are long over. Who
does the sweep is the member whose id comes first, so its traffic is one member's; two who both think so do no harm.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable

from ...session.errors import CoordinationError, MidstreamError
from ...session.ids import SessionId
from .clock import Clock, boot_clock_s
from .coordination import Claim, Coordination, Membership, Picture
from .fence import Fence, WhenAlone
from .informer import Informer
from .lease_service import LeaseService, bounded
from .membership import LeasedMembership
from .record import MemberId, Record, encode, member_id

_log = logging.getLogger(__name__)

# How often the service is asked whether it still answers, where nothing else is asked of it.
CHECK_EVERY_S = 3.0
SWEEP_EVERY_S = 300.0
# What a claim says of its session's newest owner is wanted for as long as an older one may keep something of it.
CLAIM_KEPT_S = 3600.0
_TRIES_MAX = 3


class LeasedCoordination(Coordination):
    """One process's connection; needs a running event loop from its first call on."""

    def __init__(
        self,
        service: LeaseService,
        when_alone: WhenAlone,
        clock: Clock = boot_clock_s,
        draw: Callable[[], float] = random.random,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(8),
        sweep_every_s: float = SWEEP_EVERY_S,
        claim_kept_s: float = CLAIM_KEPT_S,
    ) -> None:
        self._claim_kept_s = claim_kept_s
        self._service = service
        self._when_alone = when_alone
        self._clock = clock
        self._draw = draw
        self._draw_id = draw_id
        self._sweep_every_s = sweep_every_s
        self._informer = Informer(service, CHECK_EVERY_S, clock, draw)
        self._members: list[LeasedMembership] = []
        self._sweeping: asyncio.Task[None] | None = None

    async def join(self, record: Record, lease_s: int) -> Membership:
        """A new member."""
        entry = encode(record)
        self._informer.start()
        fault: CoordinationError | None = None
        for _ in range(_TRIES_MAX):
            # Each try is another member: of one that nobody answered for, what may be there ends by itself.
            member = member_id(record.name, lease_s, self._draw_id())
            asked_s = self._clock()
            try:
                granted_s = await bounded(self._service.name, self._service.create(member, entry))
            except CoordinationError as error:
                fault = error
                continue
            return self._joined(member, record, asked_s, min(granted_s, lease_s))
        assert fault is not None
        raise fault

    def watch(self) -> AsyncIterator[Picture]:
        """Pictures of the fleet, until `close`."""
        return self._informer.watch()

    async def holder(self, session: SessionId) -> Claim | None:
        """Who has claimed a session."""
        return await bounded(self._service.name, self._service.held(session))

    async def close(self) -> None:
        """End all tasks."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for membership in self._members:
            await membership.end()
        await self._informer.close()
        await self._service.close()

    def _joined(self, member: MemberId, record: Record, asked_s: float, granted_s: float) -> LeasedMembership:
        fence = Fence(self._when_alone)
        fence.renewed(asked_s, granted_s)
        made = LeasedMembership(self._service, self._informer, member, record, fence, asked_s, self._clock, self._draw)
        self._members = [one for one in self._members if not one.is_lost] + [made]
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="fleet-sweep")
        _log.info("fleet: service=%s joined as member=%s", self._service.name, member)
        return made

    async def _sweep(self) -> None:
        # Of claims whose owners are over: when that was first seen here.
        since_s: dict[Claim, float] = {}
        while True:
            await asyncio.sleep(self._sweep_every_s * (0.75 + 0.5 * self._draw()))
            first = self._informer.first()
            if any(one.id == first and not one.is_lost for one in self._members):
                try:
                    seen_s = self._clock()
                    over = [c for c in await self._service.claims() if await self._informer.is_over(c.owner)]
                    since_s = {claim: since_s.get(claim, seen_s) for claim in over}
                    for claim in [c for c in over if seen_s - since_s[c] >= self._claim_kept_s]:
                        await bounded(self._service.name, self._service.replace(claim, None))
                except MidstreamError as error:
                    _log.warning("fleet: claims were not swept, and are next time: %s", error)
                except Exception:
                    _log.exception("fleet: claims were not swept")
