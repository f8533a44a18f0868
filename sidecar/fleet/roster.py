"""Which members there are, and which of them are over. Pure: time is an argument.

Owns the picture's content. Invariants:

- a member is over only when its fence is closed: it has said that it left, or a whole lease has passed since the last
  moment at which it can have asked for a renewal that was answered. That moment is counted by those who take sessions
  over, never told by the service: etcd can revoke a lease that was renewed (a leader that hung and was voted out does
  so when it goes on), and anybody may delete a Kubernetes object. A member that has gone from the service cannot be
  renewed, so the lease is counted from when it was seen to have gone, or from its last renewal where all are seen.
- what was not watched was not seen: after a gap every lease is counted from the end of the gap.
- nothing follows from never having heard of a member: whoever names it can know of it sooner than the watch tells.
  Its lease is counted from when the service was asked and had no entry of it.

It does no I/O; who follows the service is `informer.py`.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...session.errors import CoordinationError
from .coordination import MEMBERS_MAX, Member
from .lease_service import Entry, Renewals
from .record import LEASE_S_MAX, MemberId, Readiness, Record, decode, lease_s_of

# How many members are remembered that are over; of others it is found out by waiting.
_OVER_MAX = 4 * MEMBERS_MAX


@dataclass(slots=True)
class _Tracked:
    """`until_s` is when its lease ends if it is not seen renewed; it has gone from the service if `has_gone`."""

    entry: Entry
    record: Record | None  # None when it cannot be read here
    until_s: float
    has_gone: bool = False

    @property
    def has_left(self) -> bool:
        return self.record is not None and self.record.readiness is Readiness.LEFT


class Roster:
    """The members of one fleet, as one follower of the service knows them."""

    def __init__(self, renewals: Renewals) -> None:
        self._are_seen = renewals is Renewals.SEEN
        self._tracked: dict[MemberId, _Tracked] = {}
        self._over: OrderedDict[MemberId, None] = OrderedDict()
        self.unreadable_count = 0
        self.version = 0  # grows with each change of what `members` returns

    def whole(self, now_s: float, entries: Mapping[MemberId, Entry]) -> None:
        """After a gap: these have entries at the service, and nobody else."""
        for member in list(self._tracked):
            tracked = self._tracked[member]
            if member not in entries and not tracked.has_gone:
                tracked.until_s = now_s + lease_s_of(member)
                self._go(member, now_s)
        for member, entry in entries.items():
            self.put(now_s, member, entry)

    def put(self, now_s: float, member: MemberId, entry: Entry) -> None:
        """The member's entry was written, or renewed where that is seen."""
        tracked = self._tracked.get(member)
        if tracked is not None and tracked.entry.text == entry.text and not tracked.has_gone:
            tracked.entry = entry
            tracked.until_s = now_s + _lease_s_or_longest(member)  # a renewal, as most are
            return
        if tracked is None and len(self._tracked) >= MEMBERS_MAX:
            raise CoordinationError(
                f"more than {MEMBERS_MAX} members have leases; is anything else writing under this fleet's name?"
            )
        try:
            lease_s, record = lease_s_of(member), decode(entry.text)
        except ValueError:
            self.unreadable_count += 1
            lease_s, record = _lease_s_or_longest(member), None
        self._tracked[member] = _Tracked(entry, record, now_s + lease_s)
        self.version += 1

    def gone(self, now_s: float, member: MemberId) -> None:
        """The member's entry is not there any more; every change before that was told."""
        tracked = self._tracked.get(member)
        if tracked is not None and not tracked.has_gone:
            if not self._are_seen:
                tracked.until_s = now_s + _lease_s_or_longest(member)
            self._go(member, now_s)

    def knows(self, member: MemberId) -> bool:
        """Whether `is_over` has anything to go by. ValueError when that is no member's id."""
        lease_s_of(member)
        return member in self._tracked or member in self._over

    def absent(self, now_s: float, member: MemberId) -> None:
        """The service was asked for a member that is not known here, after that was named, and had no entry of it."""
        if not self.knows(member) and len(self._tracked) < MEMBERS_MAX:
            self._tracked[member] = _Tracked(Entry(""), None, now_s + lease_s_of(member), has_gone=True)

    def forget(self, member: MemberId) -> None:
        """This process itself had that id, and its fence is closed for good."""
        if self._tracked.pop(member, None) is not None:
            self.version += 1
        self._over[member] = None
        self._over.move_to_end(member)
        if len(self._over) > _OVER_MAX:
            self._over.popitem(last=False)

    def tick(self, now_s: float) -> None:
        """Take out whose leases have ended among those that have gone."""
        for member in [m for m, t in self._tracked.items() if t.has_gone and now_s >= t.until_s]:
            self.forget(member)

    def silent(self, now_s: float) -> list[tuple[MemberId, str]]:
        """Who is at the service but was not seen renewed for a lease, with marks; none where renewals are not seen."""
        if not self._are_seen:
            return []
        return [(m, t.entry.mark) for m, t in self._tracked.items() if not t.has_gone and now_s >= t.until_s]

    def is_alive(self, now_s: float, member: MemberId) -> None:
        """It was renewed all the same."""
        tracked = self._tracked.get(member)
        if tracked is not None and not tracked.has_gone:
            tracked.until_s = now_s + _lease_s_or_longest(member)

    def next_s(self) -> float:
        """When `tick` or `silent` will have something new; infinite if nothing is waited for."""
        return min(self._waited_for(), default=math.inf)

    def is_over(self, now_s: float, member: MemberId) -> bool:
        """Whether no token can come from this member any more; False where that is not known."""
        tracked = self._tracked.get(member)
        if tracked is not None:
            return tracked.has_left or (tracked.has_gone and now_s >= tracked.until_s)
        return member in self._over

    def members(self) -> dict[MemberId, Member]:
        """Those that are not known to be over and whose records can be read."""
        return {
            member: Member(member, tracked.record, is_fading=tracked.has_gone)
            for member, tracked in sorted(self._tracked.items())
            if tracked.record is not None and not tracked.has_left
        }

    def _go(self, member: MemberId, now_s: float) -> None:
        tracked = self._tracked[member]
        tracked.has_gone = True
        self.version += 1
        if tracked.has_left or now_s >= tracked.until_s:
            self.forget(member)

    def _waited_for(self) -> Iterable[float]:
        return (t.until_s for t in self._tracked.values() if t.has_gone or self._are_seen)


def _lease_s_or_longest(member: MemberId) -> int:
    try:
        return lease_s_of(member)
    except ValueError:
        return LEASE_S_MAX
