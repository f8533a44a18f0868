"""Takes nodes from the coordination service: a source of the table where there is one.

Owns the comparison of one picture with the last. Invariants: a node is in the table under its member's id, which is one
life of it; a member that is over, or fading, is lost here: it may still send, but nothing of it is read any more once
its sessions were told; while the service is silent nobody is lost. Nobody is polled.
"""

import logging

from ..fleet.coordination import Coordination, Member, Picture
from ..fleet.record import Role
from .node_table import NodeTable

_LOG = logging.getLogger("midstream.gateway")


class PictureWatch:
    """Follows the fleet until it is cancelled."""

    def __init__(self, fleet: Coordination, table: NodeTable) -> None:
        self._fleet = fleet
        self._table = table
        self._known: set[str] = set()
        # Since when nothing is known any more; for people.
        self.is_stale = False

    async def follow(self) -> None:
        """Take over what each picture has; ends with the fleet's `close`."""
        async for picture in self._fleet.watch():
            self.take(picture)

    def take(self, picture: Picture) -> None:
        """What is there now."""
        if self.is_stale != (picture.stale_since_s is not None):
            self.is_stale = not self.is_stale
            _LOG.warning("event=coordination answers=%s", "no" if self.is_stale else "yes")
        there = {id: member for id, member in picture.members.items() if member.record.role is Role.NODE}
        for member in there.values():
            self._take_one(member)
        for over in self._known - set(there):
            self._table.gone(over, "its lease is over")
        self._known = set(there)

    def _take_one(self, member: Member) -> None:
        if member.is_fading:
            self._table.lost(member.id, "its lease is not renewed any more")
        else:
            # What a node has written of itself says nothing of connections that broke since.
            self._table.heard(member.id, member.record.url.rstrip("/"), member.record, asked_s=0.0)
