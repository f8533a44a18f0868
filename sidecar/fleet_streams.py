"""Where in the fleet a stream is that is not here, by the pictures of the coordination service.

Owns the list of prefixes. Invariants: a token's prefix is the drawn part of the id of the member that drew it, so it
names one life of one process, and never comes back; nobody is asked for it but that member, at the URL that it told the
service itself; while the service is silent the last picture holds. What members say to each other is proven by the
fleet's credentials, where it has any.
"""

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..proxy.fleet import Believer, Prover, Unproven
from ..proxy.reattach_elsewhere import SENT_ON
from .fleet.coordination import MEMBERS_MAX, Picture
from .fleet.record import MemberId
from .fleet_standing import Standing

_LOG = logging.getLogger("midstream.fleet")

# In a fleet without credentials a question is marked all the same: that keeps it from being passed on again.
_UNPROVEN = "1"
_FOLLOW_AGAIN_S = 1.0
_SEEN_MAX = 2 * MEMBERS_MAX


def prefix_of_member(member: MemberId) -> str:
    """How the tokens begin that a member draws."""
    return member.rpartition(".")[2]


class FleetStreams:
    """What one process knows of the others' streams. `stops_alone`: its fence is never open on a guess."""

    def __init__(
        self,
        standing: Standing,
        prover: Prover | None = None,
        believer: Believer | None = None,
        *,
        stops_alone: bool = False,
    ) -> None:
        self._stops_alone = stops_alone
        self._standing = standing
        self._prover = prover
        self._believer = believer
        self._urls: dict[str, str] = {}
        # Of all members that were ever seen from here, the newest last.
        self._seen: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """While this lasts, what the service tells is known here."""
        task = asyncio.create_task(self._follow(), name="fleet-streams")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        """Until the connection to the service is closed. What ends it otherwise is a defect, and begun again."""
        while True:
            try:
                async for picture in self._standing.coordination.watch():
                    self.take(picture)
                return
            except Exception:
                _LOG.exception("event=streams_unwatched")
            await asyncio.sleep(_FOLLOW_AGAIN_S)

    def take(self, picture: Picture) -> None:
        """Who is there now. Who only fades may still have what its clients lack."""
        self._urls = {}
        for member in picture.members.values():
            if member.id != self._standing.id:
                lives = (member.id, member.record.formerly)
                self._urls |= {prefix_of_member(id): member.record.url.rstrip("/") for id in lives if id is not None}
        for prefix in self._urls:
            self._seen[prefix] = None
            self._seen.move_to_end(prefix)
        while len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)

    def has_seen(self, prefix: str) -> bool:
        """Whether there was one of that prefix while this process was there: nobody invents that."""
        return prefix in self._seen

    # ---- asked by the proxy

    @property
    def own_prefix(self) -> str:
        """Of this life; none before the first, whose streams are found by nobody else."""
        own = self._standing.id
        return "" if own is None else prefix_of_member(own)

    @property
    def own_name(self) -> str:
        """Of this life; nobody's where it would go on sending when others cannot know that any more."""
        return (self._standing.id or "") if self._stops_alone else ""

    async def base_url_of(self, prefix: str) -> str | None:
        """Where that member takes requests, if it is there."""
        return self._urls.get(prefix)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """By which others are known."""
        return None if self._prover is None else self._prover.tls

    def vouch(self, method: str, target: str, body: bytes) -> str:
        """The proof of one request."""
        return _UNPROVEN if self._prover is None else self._prover.headers(method, target, body, name=SENT_ON)[SENT_ON]

    def believes(self, method: str, target: str, body: bytes, proof: str, *, shown: bool = False) -> str:
        """Why a request is not the fleet's; "" if it is."""
        if self._believer is None:
            return ""
        try:
            self._believer.check(method, target, proof, shown=shown, name=SENT_ON).require(body)
        except Unproven as error:
            return str(error)
        return ""
