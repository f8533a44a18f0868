"""Sessions that are over, as far as one may go back to them: what was asked, and what was answered.

Owns a bounded memory. It is kept only where snapshots are stored, for without one nothing can begin there.
"""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from ..proxy.coordinator import SessionFacts
from ..session.ids import SessionId
from ..session.key import CompatibilityKey

SESSIONS_MAX = 256
BYTES_MAX = 64 << 20
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Past:
    """One ended session: its request, its outputs, the worker that wrote them, and how its engine ended them, if so."""

    facts: SessionFacts
    outputs: tuple[int, ...]
    worker: str
    key: CompatibilityKey | None
    finish: str = ""


class PastSessions:
    """The newest ended sessions."""

    def __init__(self) -> None:
        self._kept: OrderedDict[SessionId, tuple[Past, int]] = OrderedDict()
        self._size_bytes = 0

    def add(self, past: Past) -> None:
        """Remember a session; the oldest are forgotten for it."""
        size_bytes = len(msgspec.json.encode(past.facts.body)) + _TOKEN_BYTES * len(past.outputs)
        if size_bytes > BYTES_MAX:
            return
        self._kept[past.facts.session] = (past, size_bytes)
        self._size_bytes += size_bytes
        while len(self._kept) > SESSIONS_MAX or self._size_bytes > BYTES_MAX:
            _, (_, gone_bytes) = self._kept.popitem(last=False)
            self._size_bytes -= gone_bytes

    def get(self, session: SessionId) -> Past | None:
        """A session, if it is still remembered."""
        found = self._kept.get(session)
        return found[0] if found is not None else None
