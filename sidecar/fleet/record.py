"""What a member of a fleet says of itself, and how it is written down. Pure.

Owns the record's format. Invariants: what is encoded fits `RECORD_BYTES_MAX`; what is decoded is valid in every field;
an unknown version is refused, never guessed. A *member id* names one life of a member: it is drawn anew at each join
and never comes back, so what was once said of it for good stays true. It carries the length of its lease, which those
must know who wait for its end without ever having seen its record.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NewType
from urllib.parse import urlsplit

MemberId = NewType("MemberId", str)

RECORD_BYTES_MAX = 16 << 10
LEASE_S_MIN = 3
LEASE_S_MAX = 60
_VERSION = 1
TEXT_MAX = 512
_LIST_MAX = 64
_SLOTS_MAX = 1 << 24
# Names become parts of Kubernetes' object names, which are narrower than most.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ID = re.compile(rf"({_NAME.pattern})\.([1-9][0-9]?)s\.[0-9a-f]{{16}}")


class Role(StrEnum):
    """What a member does."""

    NODE = "node"  # a sidecar with its workers
    GATEWAY = "gateway"  # takes clients, has no workers


class Readiness(StrEnum):
    """What a member takes."""

    READY = "ready"
    NOT_READY = "not-ready"  # nothing yet, or nothing at the moment
    DRAINING = "draining"  # no new sessions, and it would be rid of those that it has
    LEFT = "left"  # its last word: it sends no token any more


class Load(StrEnum):
    """How busy a member is; a class, so that it changes seldom."""

    IDLE = "idle"
    BUSY = "busy"
    FULL = "full"  # what it takes now waits


@dataclass(frozen=True, slots=True)
class Record:
    """All that a gateway needs to choose a node; ValueError names the field that is wrong."""

    name: str
    role: Role
    url: str
    readiness: Readiness = Readiness.NOT_READY
    load: Load = Load.IDLE
    models: tuple[str, ...] = ()  # as clients name them
    keys: tuple[str, ...] = ()  # digests of the compatibility keys of its workers
    slot_count: int = 0  # sessions that it can have in flight
    version: str = ""  # of midstream
    replicas: str = ""  # where it keeps others' snapshots in its memory: peer://HOST:PORT, or nowhere
    formerly: MemberId | None = None  # the same process under the lease that it lost

    def __post_init__(self) -> None:
        member_name(self.name)
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or len(self.url) > TEXT_MAX:
            raise ValueError(f"url {self.url[:80]!r}: expected something like http://10.0.0.7:8800")
        for field in ("models", "keys"):
            words = getattr(self, field)
            if len(words) > _LIST_MAX or any(not word or len(word) > TEXT_MAX for word in words):
                raise ValueError(f"{field}: expected at most {_LIST_MAX} texts of at most {TEXT_MAX} characters")
        for field in ("version", "replicas"):
            if len(getattr(self, field)) > TEXT_MAX:
                raise ValueError(f"{field}: expected at most {TEXT_MAX} characters")
        if not 0 <= self.slot_count <= _SLOTS_MAX:
            raise ValueError(f"slot_count {self.slot_count}: expected 0 to {_SLOTS_MAX}")
        if self.formerly is not None:
            lease_s_of(self.formerly)


def member_name(text: str) -> str:
    """Check and return the name of a member."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"name {text[:80]!r}: use 1 to 63 lower-case letters, digits and '-', and begin and end with none of these"
        )
    return text


def member_id(name: str, lease_s: int, drawn: str) -> MemberId:
    """The id of a new member; `drawn` are 16 hex digits that nobody draws twice."""
    text = f"{member_name(name)}.{lease_s}s.{drawn}"
    lease_s_of(text)
    return MemberId(text)


def lease_s_of(member: str) -> int:
    """The length of the lease of a member. ValueError when that is no member's id."""
    found = _ID.fullmatch(member)
    if found is None or not LEASE_S_MIN <= int(found[3]) <= LEASE_S_MAX:
        raise ValueError(
            f"member {member[:120]!r}: expected <name>.<seconds>s.<16 hex digits>, of {LEASE_S_MIN} to {LEASE_S_MAX} s"
        )
    return int(found[3])


def encode(record: Record) -> str:
    """The record as one line of JSON. ValueError when it is too long."""
    body: dict[str, Any] = {field: getattr(record, field) for field in record.__slots__}
    text = json.dumps({"v": _VERSION, **body}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    size_bytes = len(text.encode())
    if size_bytes > RECORD_BYTES_MAX:
        raise ValueError(
            f"record of {record.name}: {size_bytes} bytes, at most {RECORD_BYTES_MAX} are kept; name fewer models"
        )
    return text


def decode(text: str) -> Record:
    """The record that `encode` wrote. ValueError when it is none, or of a version that is not known here."""
    if len(text) > RECORD_BYTES_MAX:
        raise ValueError(f"record of {len(text)} characters: at most {RECORD_BYTES_MAX} bytes are kept")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"record is not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("v") != _VERSION:
        raise ValueError(f"record of an unknown version; expected {_VERSION}: run the same midstream everywhere")
    return _from_json(body)


def _from_json(body: Mapping[str, Any]) -> Record:
    texts = {field: body.get(field) for field in ("name", "role", "url", "readiness", "load", "version")}
    texts["replicas"] = body.get("replicas", "")
    lists = {field: body.get(field) for field in ("models", "keys")}
    slots, formerly = body.get("slot_count"), body.get("formerly")
    for field, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{field}: expected text, got {type(value).__name__}")
    for field, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{field}: expected a list of texts")
    if type(slots) is not int:
        raise ValueError(f"slot_count: expected a number, got {type(slots).__name__}")
    if formerly is not None and not isinstance(formerly, str):
        raise ValueError(f"formerly: expected text or null, got {type(formerly).__name__}")
    return Record(
        name=str(texts["name"]),
        role=Role(str(texts["role"])),
        url=str(texts["url"]),
        readiness=Readiness(str(texts["readiness"])),
        load=Load(str(texts["load"])),
        models=tuple(lists["models"] or ()),
        keys=tuple(lists["keys"] or ()),
        slot_count=slots,
        version=str(texts["version"]),
        replicas=str(texts["replicas"]),
        formerly=None if formerly is None else MemberId(formerly),
    )


def with_readiness(record: Record, readiness: Readiness) -> Record:
    """The same record but for its readiness."""
    return replace(record, readiness=readiness)
