"""The account of one stream of events: the frames and the text that the client was sent, in order. Pure.

Invariant: a replay is compared with all of it from the beginning, frame by frame and character by character, before
anything of that replay counts as new; Mismatch leaves the account as it was. Runs of text have no seams: however two
engines cut it into deltas, it is one text.
"""

from dataclasses import dataclass
from io import StringIO

from .account import Mismatch
from .dialects.events import Name, Piece, Role


@dataclass(slots=True)
class _Run:
    """Text of one field, between two frames."""

    key: str
    text: StringIO
    size: int = 0


@dataclass(frozen=True, slots=True)
class _Frame:
    key: str
    names: tuple[Name, ...]


class Transcript:
    """What the client has (over all attempts), and how far the current attempt has told it again."""

    __slots__ = ("_at", "_entries", "_has_text", "_offset")

    def __init__(self) -> None:
        self._entries: list[_Run | _Frame] = []
        self._has_text = False
        # Of the current attempt: the entry that it must tell next, and how much of it was told.
        self._at = 0
        self._offset = 0

    @property
    def is_empty(self) -> bool:
        """Whether the client has nothing."""
        return not self._entries

    @property
    def has_text(self) -> bool:
        """Whether the client has some of the answer itself."""
        return self._has_text

    @property
    def last_key(self) -> str:
        """The key of the newest frame or text."""
        return self._entries[-1].key if self._entries else ""

    def begin(self) -> None:
        """A new attempt, which tells everything from the beginning."""
        self._at = self._offset = 0

    def caught_up(self) -> bool:
        """Whether the attempt has told all that the client has: what follows is new."""
        left = len(self._entries) - self._at
        if left > 1:
            return False
        last = self._entries[-1] if left else None
        return last is None or (isinstance(last, _Run) and self._offset == last.size)

    def enter(self, piece: Piece, names: tuple[Name, ...] = ()) -> None:
        """Enter what the client gets; only for attempts that have caught up."""
        if piece.role is not Role.TEXT:
            self._entries.append(_Frame(piece.key, names))
            self._at, self._offset = len(self._entries), 0
            return
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, _Run) or last.key != piece.key:
            last = _Run(piece.key, StringIO(newline=""))
            self._entries.append(last)
        last.text.write(piece.text)
        last.size += len(piece.text)
        self._at, self._offset = len(self._entries) - 1, last.size
        self._has_text = True

    def text_known(self, piece: Piece) -> int:
        """How many characters of a replayed text the client has. Raises Mismatch."""
        if self.caught_up() or not piece.text:
            return 0
        entry = self._entries[self._at]
        if not isinstance(entry, _Run) or entry.key != piece.key:
            raise Mismatch(f"text of {piece.key} comes where the client has {_told(entry)}")
        entry.text.seek(self._offset)
        had = entry.text.read(len(piece.text))
        entry.text.seek(0, 2)
        if not piece.text.startswith(had):
            raise Mismatch(f"text of {piece.key} differs from what the client has after character {self._offset}")
        is_last = self._at == len(self._entries) - 1
        if len(had) < len(piece.text) and not is_last:
            raise Mismatch(f"text of {piece.key} is longer than the {entry.size} characters that the client has")
        self._offset += len(had)
        if self._offset == entry.size and not is_last:
            self._at, self._offset = self._at + 1, 0
        return len(had)

    def frame_known(self, piece: Piece) -> tuple[Name, ...] | None:
        """The names under which the client has a replayed frame; None if it is new. Raises Mismatch."""
        if self.caught_up():
            return None
        entry = self._entries[self._at]
        if isinstance(entry, _Run):
            raise Mismatch(f"{piece.key} comes after {self._offset} of the {entry.size} characters of {entry.key}")
        if entry.key != piece.key:
            raise Mismatch(f"{piece.key} comes where the client has {_told(entry)}")
        self._at += 1
        return entry.names


def _told(entry: _Run | _Frame) -> str:
    return f"text of {entry.key}" if isinstance(entry, _Run) else entry.key
