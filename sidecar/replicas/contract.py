"""What a store elsewhere must do beside session/store.py, and what an objects' service must do to be made one of it.

Words: an *object* is bytes under a name, in a service that may lose it at any time; *stored bytes* are a chunk as
session/chunk.py writes it; a *writer* is the node whose snapshots they are. Pure.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from ...session.store import Draft

CHUNK_NAME = re.compile(r"[0-9a-f]{32}")
SESSION_NAME = re.compile(r"[0-9a-f]{32}")
SNAPSHOT_NAME = re.compile(r"\d{10}-\d{10}-\d{17}")
WRITER_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,62})")


class Refusal(StrEnum):
    """Why a store elsewhere did not do something: stable words for metrics."""

    UNREACHABLE = "unreachable"
    SLOW = "slow"
    UNAUTHORIZED = "unauthorized"
    FULL = "full"
    BUSY = "busy"
    TOO_LARGE = "too_large"
    MISSING = "missing"
    CORRUPT = "corrupt"
    REQUEST = "request"
    INTERNAL = "internal"


class ReplicaError(StoreError):
    """A store elsewhere did not do what it was asked for; `reason` is a stable word, the text says fact and remedy."""

    def __init__(self, reason: Refusal, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ReplicaDraft(Draft, Protocol):
    """A snapshot that is being written elsewhere."""

    def keep_all(self, names: Collection[str]) -> frozenset[str]:
        """`keep` for many at once: those that are stored already, in as few round trips as the service allows."""
        ...

    def put_stored(self, name: str, stored: bytes) -> None:
        """As `put_chunk`, of a chunk's stored bytes. MUST refuse, with a CorruptError, what is not that chunk."""
        ...

    def __enter__(self) -> "ReplicaDraft": ...


class ReplicaReader(Protocol):
    """The part of a store that a restore needs."""

    def latest(self, session: SessionId) -> Manifest | None:
        """As Store.latest. MUST pass over a snapshot of which a chunk is known to be gone."""
        ...

    def get_stored(self, name: str) -> bytes:
        """As Store.get_chunk, but its stored bytes. MUST be proven with chunk.check."""
        ...


class ReplicaStore(ReplicaReader, Protocol):
    """A store elsewhere, as who sends there sees it: what others have there is not to be removed from here."""

    def get_chunk(self, name: str) -> bytes:
        """As Store.get_chunk."""
        ...

    def begin(self) -> ReplicaDraft:
        """As Store.begin."""
        ...

    def finish(self, session: SessionId) -> None:
        """As Store.finish."""
        ...

    def close(self) -> None:
        """Let go of connections and processes."""
        ...


class Objects(Protocol):
    """A service that keeps bytes under names. Every failure is a ReplicaError; threads may call everything.

    Each call MUST end within a time of its own. An object MUST be seen whole or not at all.
    """

    lists_folders: bool
    """Whether `list` costs about as much as what it returns; else names are guessed where that is possible."""

    def put(self, name: str, content: bytes) -> None:
        """Keep an object that is written once: whoever else puts one of that name puts the same."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Keep an object in the place of one that may be there. MUST be there when this returns."""
        ...

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """An object, or None if it is not there. MUST NOT read more than `bytes_max`."""
        ...

    def present(self, names: Collection[str]) -> frozenset[str]:
        """Those of the names that are there."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there are none to remove."""
        ...

    def list(self, prefix: str, count_max: int) -> Mapping[str, int] | None:
        """Names that begin with `prefix`, and their sizes; None where nobody can tell, or there are more."""
        ...

    def close(self) -> None:
        """Let go of connections and processes."""
        ...
