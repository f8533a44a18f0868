"""In place: the pages of the epoch before, kept for the sessions that may come back for them.

Owns which pages are reserved and for whom. Invariant: a reserved page is handed to nobody but its session, and one that
several sessions share (a cached prefix) to none of them until one is left: the others get copies. Pure but for `Pages`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...session.ids import SessionId
from .pages import Pages


@dataclass(frozen=True, slots=True)
class Taken:
    """The pages that a session has got, and whether its KV is in all of them already."""

    pages: list[int]
    complete: bool


class Reservations:
    """Reserved pages of sessions that have not come back yet."""

    def __init__(self, pages: Pages, tables: Mapping[SessionId, Sequence[int]]) -> None:
        """Reserve all pages of `tables`; a session with a page that cannot be had is left out."""
        self._pages = pages
        self._tables: dict[SessionId, tuple[int, ...]] = {}
        self._holders: Counter[int] = Counter()
        self.lost = 0
        for session, table in tables.items():
            if all(page > 0 for page in table) and pages.take_these(table):
                self._tables[session] = tuple(table)
                self._holders.update(table)
            else:
                self.lost += 1

    def __len__(self) -> int:
        return len(self._tables)

    def take(self, session: SessionId, count: int) -> Taken | None:
        """The session's first `count` pages, held for it; others in the place of shared ones. None where it has fewer.

        None also where there are no others to be had: the session has lost its reservation then.
        """
        table = self._tables.get(session, ())
        if len(table) < count:
            self.release(session)
            return None
        shared = [page for page in table[:count] if self._holders[page] > 1]
        copies = self._pages.take(len(shared)) if shared else []
        if copies is None:
            self.release(session)
            return None
        others = iter(copies)
        given = [next(others) if self._holders[page] > 1 else page for page in table[:count]]
        # What it was given is held on, by whoever asked; of the rest nothing is its any more.
        self._drop(session, keep=set(given))
        return Taken(given, complete=not shared)

    def release(self, session: SessionId) -> None:
        """The session needs its reserved pages no more."""
        self._drop(session, keep=set())

    def release_all(self) -> None:
        """Nobody comes back any more."""
        for session in list(self._tables):
            self.release(session)

    def _drop(self, session: SessionId, keep: set[int]) -> None:
        nobodys = []
        for page in self._tables.pop(session, ()):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page not in keep:
                    nobodys.append(page)
        self._pages.give_back(nobodys)
