"""One stored block: a checked header and a zstd frame.

Owns the chunk format (docs/formats.md) and the name of a chunk, which is the XXH3-128 of its raw bytes. Invariant: what
`decode` returns is, bit for bit, what was encoded; anything else raises CorruptError. Engines never import this.

Level 1: on KV of a real model in bf16 and fp32, levels 1 and 3 save the same, level 3 takes longer, and level -1 saves
nothing (figures in docs/formats.md).
"""

import struct

import xxhash
import zstandard

from .errors import CorruptError

CHUNK_VERSION = 1
LEVEL = 1
RAW_BYTES_MAX = 1 << 30

_MAGIC = b"MIDC"
_FIELDS = struct.Struct("<4sHHQ16sQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


def chunk_name(raw: bytes | bytearray | memoryview) -> str:
    """The name of the chunk that holds these bytes: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(raw)


def encode(raw: bytes | bytearray | memoryview) -> tuple[str, bytes]:
    """The name and the stored bytes of a block. ValueError for an empty block or one above RAW_BYTES_MAX."""
    size = memoryview(raw).nbytes
    if not 0 < size <= RAW_BYTES_MAX:
        raise ValueError(f"a block of {size} bytes cannot be a chunk; expected 1 to {RAW_BYTES_MAX}")
    digest = xxhash.xxh3_128_digest(raw)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(raw)
    fields = _FIELDS.pack(_MAGIC, CHUNK_VERSION, 0, size, digest, len(frame))
    return digest.hex(), fields + _CHECK.pack(xxhash.xxh3_64_intdigest(frame, xxhash.xxh3_64_intdigest(fields))) + frame


def check(name: str, stored: bytes | bytearray | memoryview) -> int:
    """Prove that these are the stored bytes of chunk `name`, without unpacking them; returns the size of its block.

    CorruptError otherwise. Whether the frame holds the block of that name is known only when it is unpacked.
    """
    if len(stored) < HEADER_BYTES:
        raise CorruptError(f"chunk {name}: {len(stored)} bytes are fewer than a header; recompute from the journal")
    fields = bytes(stored[: _FIELDS.size])
    magic, version, flags, size, digest, frame_size = _FIELDS.unpack(fields)
    (check,) = _CHECK.unpack_from(stored, _FIELDS.size)
    frame = memoryview(stored)[HEADER_BYTES:]
    if magic != _MAGIC:
        raise CorruptError(f"chunk {name}: this is not a chunk; recompute from the journal")
    if len(frame) != frame_size:
        raise CorruptError(f"chunk {name}: {len(frame)} of {frame_size} bytes; recompute from the journal")
    # Header and frame are proven before anything in them is acted upon: a damaged size never becomes an allocation.
    if xxhash.xxh3_64_intdigest(frame, xxhash.xxh3_64_intdigest(fields)) != check:
        raise CorruptError(f"chunk {name}: checksum differs; recompute from the journal")
    if version != CHUNK_VERSION or flags != 0:
        raise CorruptError(
            f"chunk {name}: version {version}, expected {CHUNK_VERSION}; read it with the midstream it is of"
        )
    if digest.hex() != name or not 0 < size <= RAW_BYTES_MAX:
        raise CorruptError(f"chunk {name}: the file holds {digest.hex()}; recompute from the journal")
    return int(size)


def decode(name: str, stored: bytes | bytearray | memoryview) -> bytes:
    """The raw bytes of chunk `name`. Raises CorruptError for whatever is not exactly what `encode` made of them."""
    size = check(name, stored)
    try:
        frame = memoryview(stored)[HEADER_BYTES:]
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptError(f"chunk {name}: {error}; recompute from the journal") from error
    if len(raw) != size or xxhash.xxh3_128_hexdigest(raw) != name:
        raise CorruptError(f"chunk {name}: checksum of the block differs; recompute from the journal")
    return raw
