"""What the objects of a store elsewhere are called, and what a manifest's object holds (docs/formats.md). Pure.

    <prefix>chunks/<writer>/<32 digits>              a chunk's stored bytes
    <prefix>sessions/<session>/<generation>.<slot>   one of a generation's two latest snapshots; 10 digits, 0 or 1
    <prefix>writers/<writer>/<session>               the writer has snapshots of that session: `live` or `finished`

Invariant: of one generation only its one owner ever writes, and of one writer's folder only that writer. So nothing has
to be read before it is written, and who was replaced can never take the place of who came after.
"""

import re
from dataclasses import dataclass

from ...session import manifest
from ...session.errors import CorruptError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from .contract import SESSION_NAME, WRITER_NAME

SLOTS = (0, 1)
LIVE, FINISHED = b"live", b"finished"
# Where names have to be guessed: more owners than a session ever has, in one question.
GENERATIONS_GUESSED = 256
_MAGIC = b"midstream-replica 1 "
_SLOT = re.compile(r"([0-9]{10})\.([01])")
ENVELOPE_BYTES_MAX = manifest.MANIFEST_BYTES_MAX + 256


@dataclass(frozen=True, slots=True)
class Placed:
    """A snapshot as its object says: the manifest, and in whose folder its chunks are."""

    manifest: Manifest
    writer: str
    size_bytes: int

    @property
    def order(self) -> tuple[int, int, float]:
        """The latest has the highest."""
        return self.manifest.generation, self.manifest.kv_len, self.manifest.created_at

    @property
    def snapshot(self) -> str:
        """Its name in lists."""
        return snapshot_name(self.manifest)


def snapshot_name(snapshot: Manifest) -> str:
    """The name of a snapshot, as in the store on disk."""
    stamp = min(int(snapshot.created_at * 1e6), 10**17 - 1)
    return f"{snapshot.generation:010d}-{snapshot.kv_len:010d}-{stamp:017d}"


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one store, as one writer uses them."""

    prefix: str
    writer: str

    def chunk(self, name: str, writer: str) -> str:
        """A chunk's object."""
        return f"{self.prefix}chunks/{writer}/{name}"

    def chunks(self) -> str:
        """What the objects of the writer's own chunks begin with."""
        return f"{self.prefix}chunks/{self.writer}/"

    def session(self, session: SessionId) -> str:
        """What the objects of a session's manifests begin with."""
        return f"{self.prefix}sessions/{session}/"

    def slot(self, session: SessionId, generation: int, slot: int) -> str:
        """A manifest's object."""
        return f"{self.session(session)}{generation:010d}.{slot}"

    def guesses(self, session: SessionId, first: int) -> list[str]:
        """Where manifests may be, of so many generations."""
        span = range(first, first + GENERATIONS_GUESSED)
        return [self.slot(session, generation, slot) for generation in span for slot in SLOTS]

    def all_sessions(self) -> str:
        """What all manifests' objects begin with."""
        return f"{self.prefix}sessions/"

    def mine(self) -> str:
        """What the marks of the writer's sessions begin with."""
        return f"{self.prefix}writers/{self.writer}/"

    def mark(self, session: SessionId) -> str:
        """The mark that the writer has snapshots of a session."""
        return f"{self.mine()}{session}"

    def session_of(self, name: str) -> SessionId | None:
        """Whose manifest or mark an object is."""
        parts = name.removeprefix(self.prefix).split("/")
        if len(parts) == 3 and parts[0] == "sessions" and _SLOT.fullmatch(parts[2]):
            parts.pop()
        session = parts[-1]
        return SessionId(session) if SESSION_NAME.fullmatch(session) else None


def slot_of(name: str) -> tuple[int, int] | None:
    """Generation and slot of a manifest's object."""
    found = _SLOT.fullmatch(name.rpartition("/")[2])
    return (int(found[1]), int(found[2])) if found else None


def encode(snapshot: Manifest, writer: str) -> bytes:
    """What a manifest's object holds: a line that says whose chunks these are, and the manifest."""
    return _MAGIC + writer.encode() + b"\n" + manifest.encode(snapshot)


def decode(session: SessionId, stored: bytes) -> Placed:
    """Read a manifest's object; CorruptError for anything else. A wrong writer leads to chunks that are not there."""
    head, newline, rest = stored.partition(b"\n")
    writer = head.removeprefix(_MAGIC).decode("ascii", "replace")
    if not newline or not head.startswith(_MAGIC) or not WRITER_NAME.fullmatch(writer):
        raise CorruptError(f"snapshot of session {session}: not one of midstream's; an older one or none is used")
    found = manifest.decode(rest)
    if found.session != session:
        raise CorruptError(f"snapshot of session {session}: it is of session {found.session}")
    return Placed(found, writer, len(stored))
