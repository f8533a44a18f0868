"""How far one store elsewhere is behind this node's own. Pure: time is an argument.

Owns what of each session is there, and since when it is less than here. Invariant: a session is behind from the moment
that a longer or newer snapshot was seen here until one at least as long, of that generation, was published there; one
that is over, or gone from here, is not behind. Bounded by the sessions of the store on disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...session.disk_store import Head
from ...session.ids import SessionId
from .urgency import Behind

SESSIONS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Shape:
    """What a session's blocks are like, as its first manifest says."""

    prompt_len: int
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind: in all, and the furthest."""

    sessions: int
    tokens: int
    tokens_max: int
    seconds_max: float


@dataclass(slots=True)
class _Session:
    head: Head
    # What is there: generation and positions.
    generation: int = 0
    kv_len: int = 0
    since_s: float | None = None
    checked_s: float = 0.0
    not_before_s: float = 0.0
    is_told: bool = False
    published_s: float | None = None

    @property
    def missing(self) -> int:
        if self.head.finished:
            return 0
        covered = self.covered
        return max(0, self.head.kv_len - covered)

    @property
    def covered(self) -> int:
        """Of an older generation nothing counts before the new owner has published: its positions may be others."""
        return self.kv_len if self.generation == self.head.generation else 0


class Backlog:
    """The account of one store. A session that is there is not sent again within `every_s`."""

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s = every_s
        self._sessions: dict[SessionId, _Session] = {}

    def see(self, heads: Sequence[Head], now_s: float) -> None:
        """What this node's own store has now."""
        seen = {head.session: head for head in sorted(heads, key=lambda h: h.created_at)[-SESSIONS_MAX:]}
        for gone in self._sessions.keys() - seen.keys():
            del self._sessions[gone]
        for session, head in seen.items():
            known = self._sessions.setdefault(session, _Session(head))
            known.head = head
            if not head.finished:
                known.is_told = False
            self._mark(known, now_s)

    def published(self, session: SessionId, generation: int, kv_len: int, now_s: float) -> None:
        """A snapshot of a session is there now."""
        known = self._sessions.get(session)
        if known is not None and (generation, kv_len) >= (known.generation, known.kv_len):
            known.since_s, known.published_s = None, now_s
            self.found(session, generation, kv_len, now_s)

    def unchecked(self, since_s: float) -> SessionId | None:
        """A session that is not behind, and was last known to be there before that time: the longest ago."""
        old = [
            (known.checked_s, session)
            for session, known in self._sessions.items()
            if known.kv_len and known.checked_s < since_s and not known.head.finished
        ]
        return min(old)[1] if old else None

    def found(self, session: SessionId, generation: int, kv_len: int, now_s: float) -> None:
        """What is there of a session, as the store itself says."""
        known = self._sessions.get(session)
        if known is not None:
            known.generation, known.kv_len, known.checked_s = generation, kv_len, now_s
            self._mark(known, now_s)

    def lost(self) -> None:
        """Nothing of what was there is known to be there any more."""
        for known in self._sessions.values():
            known.generation = known.kv_len = 0

    def put_off(self, session: SessionId, until_s: float) -> None:
        """A session could not be sent for a reason of its own; it is left alone for a while."""
        known = self._sessions.get(session)
        if known is not None:
            known.not_before_s = until_s

    def over(self, now_s: float) -> list[Head]:
        """Sessions that are over, of which the store elsewhere is to be told."""
        return [
            known.head
            for known in self._sessions.values()
            if known.head.finished and not known.is_told and now_s >= known.not_before_s
        ]

    def told(self, session: SessionId) -> None:
        """The store elsewhere knows that a session is over."""
        known = self._sessions.get(session)
        if known is not None:
            known.is_told = True

    def behind(self, shapes: Mapping[SessionId, Shape], now_s: float) -> list[Behind]:
        """What could be sent now, of the sessions whose shape is known."""
        found = []
        for session, known in self._sessions.items():
            shape = shapes.get(session)
            if shape is None or not known.missing or now_s < known.not_before_s:
                continue
            if known.covered and known.published_s is not None and now_s < known.published_s + self._every_s:
                continue
            head, covered = known.head, known.covered
            blocks = -(-head.kv_len // shape.block_tokens) - covered // shape.block_tokens
            waited_s = now_s - (known.since_s if known.since_s is not None else now_s)
            found.append(
                Behind(
                    session,
                    shape.prompt_len,
                    head.kv_len,
                    covered,
                    blocks * shape.block_bytes,
                    head.created_at,
                    waited_s,
                )
            )
        return found

    def unshaped(self, shapes: Mapping[SessionId, Shape]) -> list[SessionId]:
        """Sessions that are behind, and of which it is not known yet what they are like."""
        return [s for s, known in self._sessions.items() if known.missing and s not in shapes]

    def lag(self, now_s: float) -> Lag:
        """How far behind now."""
        each = self.lag_of_each(now_s).values()
        return Lag(
            len(each),
            sum(tokens for tokens, _ in each),
            max((tokens for tokens, _ in each), default=0),
            max((seconds for _, seconds in each), default=0.0),
        )

    def lag_of_each(self, now_s: float) -> dict[SessionId, tuple[int, float]]:
        """Tokens and seconds, of each session that is behind."""
        return {
            session: (known.missing, now_s - (known.since_s if known.since_s is not None else now_s))
            for session, known in self._sessions.items()
            if known.missing
        }

    def _mark(self, known: _Session, now_s: float) -> None:
        if not known.missing:
            known.since_s = None
        elif known.since_s is None:
            known.since_s = now_s
