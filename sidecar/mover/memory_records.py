"""What is written into the tier-1 area beside the blocks themselves (docs/formats.md). Pure.

Owns the header of the area, that of an extent, and the record of a slab. Invariant: whatever was torn, cleared or never
written decodes to None. A record proves itself by its checksum, and its place in its session by its digest, which
continues that of the block before: equal digests mean the same session, prompt, key, form and tokens up to there.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from ...session.ids import SessionId
from .pools import SumKind

VERSION = 1
HEADER_BYTES = 4096
EXTENT_HEADER_BYTES = 64

Form = tuple[str, int, int]

_AREA_MAGIC = b"MIDTIER1"
_EXTENT_MAGIC = b"MIDEXTNT"
_CRC = struct.Struct("<I")
_AREA = struct.Struct("<8sIIQ")
_EXTENT = struct.Struct("<8sIIQ16s")
_RECORD = struct.Struct("<IIQ16sIIII16s16sIIQ16s")
_KINDS = tuple(SumKind)


@dataclass(frozen=True, slots=True)
class Story:
    """What all blocks of a session have in common: whose they are, of which engine and which prompt.

    `key` is the digest of the compatibility key (32 hex digits), `form` that of the pool.
    """

    session: SessionId
    form: Form
    ranks: int
    key: str
    prompt_len: int
    prompt_hash: str

    def root(self) -> bytes:
        """What the digest of the first block continues."""
        words = (self.session, *self.form, self.ranks, self.key, self.prompt_len, self.prompt_hash)
        return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Record:
    """One kept block: block `ordinal` of a session, of which the first `positions` positions mean something.

    `tokens` are the ids of these positions that are outputs, `chain` is the digest up to and including them. Generation
    and table generation are those under which an engine last had it with this sum.
    """

    story: Story
    generation: int
    table_generation: int
    ordinal: int
    sequence: int
    positions: int
    kind: SumKind
    sum: int
    chain: bytes
    tokens: tuple[int, ...]


def linked(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block whose positions hold these outputs, after a block with the digest `before`."""
    return hashlib.blake2b(before + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=16).digest()


def encode_area(extent_count: int, extent_bytes: int) -> bytes:
    """The header of an area."""
    return _sealed(_AREA.pack(_AREA_MAGIC, VERSION, extent_count, extent_bytes))


def decode_area(raw: bytes) -> tuple[int, int] | None:
    """Extents and bytes of each."""
    body = _checked(raw, _AREA)
    if body is None:
        return None
    magic, version, count, size_bytes = _AREA.unpack(body)
    return (count, size_bytes) if (magic, version) == (_AREA_MAGIC, VERSION) else None


def encode_extent(form: Form, slab_count: int) -> bytes:
    """The header of an extent whose slabs are blocks of a form."""
    fingerprint, block_tokens, block_bytes = form
    return _sealed(_EXTENT.pack(_EXTENT_MAGIC, block_tokens, slab_count, block_bytes, bytes.fromhex(fingerprint)))


def decode_extent(raw: bytes) -> tuple[Form, int] | None:
    """The form of an extent's slabs, and how many there are."""
    body = _checked(raw, _EXTENT)
    if body is None:
        return None
    magic, block_tokens, slab_count, block_bytes, fingerprint = _EXTENT.unpack(body)
    return ((fingerprint.hex(), block_tokens, block_bytes), slab_count) if magic == _EXTENT_MAGIC else None


def record_bytes(block_tokens: int) -> int:
    """The size of a record, in whole units of 8 bytes."""
    return -(-(_CRC.size + _RECORD.size + 4 * block_tokens) // 8) * 8


def encode_record(record: Record) -> bytes:
    """A record as it is written."""
    story = record.story
    body = _RECORD.pack(
        record.ordinal,
        len(record.tokens),
        record.sequence,
        bytes.fromhex(story.session),
        record.generation,
        record.table_generation,
        story.prompt_len,
        story.ranks,
        bytes.fromhex(story.prompt_hash),
        bytes.fromhex(story.key),
        record.positions,
        _KINDS.index(record.kind),
        record.sum,
        record.chain,
    )
    body += struct.pack(f"<{len(record.tokens)}I", *record.tokens)
    return _sealed(body.ljust(record_bytes(story.form[1]) - _CRC.size, b"\0"))


def decode_record(raw: bytes, form: Form) -> Record | None:
    """The record of a slab; None for one that is free, or was not written to its end."""
    size = record_bytes(form[1])
    if len(raw) != size or _CRC.unpack_from(raw)[0] != crc32(raw[_CRC.size :]):
        return None
    body = raw[_CRC.size :]
    (
        ordinal, count, sequence, session, generation, table_generation, prompt_len, ranks, prompt_hash, key, positions,
        kind, total, chain,
    ) = _RECORD.unpack_from(body)  # fmt: skip
    if count > positions or not 0 < positions <= form[1] or kind >= len(_KINDS):
        return None
    tokens = struct.unpack_from(f"<{count}I", body, _RECORD.size)
    story = Story(SessionId(session.hex()), form, ranks, key.hex(), prompt_len, prompt_hash.hex())
    return Record(story, generation, table_generation, ordinal, sequence, positions, _KINDS[kind], total, chain, tokens)


def is_clear(raw: bytes) -> bool:
    """Whether nothing is written there."""
    return not any(raw)


def _sealed(body: bytes) -> bytes:
    return _CRC.pack(crc32(body)) + body


def _checked(raw: bytes, of: struct.Struct) -> bytes | None:
    body = raw[_CRC.size : _CRC.size + of.size]
    return body if len(body) == of.size and _CRC.unpack_from(raw)[0] == crc32(body) else None
