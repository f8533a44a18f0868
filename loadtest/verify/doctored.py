"""Snapshots that are wrong on purpose, with right checksums: what a verdict machine must notice.

Owns the two ways in which a snapshot is doctored, and the writing of it beside a store's own writer. Invariant: what is
written is well-formed (every checksum and name fits its content), so that nothing but a comparison of answers can find
it; and it is written for one session alone. Whether it is found is for others to see.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from ...session import chunk, manifest
from ...session.disk_store import DiskStore
from ...session.durable_files import DurableFiles
from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest

# The highest exponent bit, in the high byte of a value: of bf16 and fp16 (odd bytes), fp32 (the last of four), fp8.
HIGH_EXPONENT_BIT = 0x40
HIGH_BYTE = 3
# High bytes of values of ordinary size, of either sign: what lies there is data, and that bit is clear. With it the
# value is huge, but still a number (from 0x3F it could become none).
_ORDINARY = range(0x2C, 0x3F)
_TRIES = 4096


@dataclass(frozen=True, slots=True)
class Flipped:
    """Where a bit was flipped: block of the session, byte in the block."""

    block: int
    byte: int


class DoctoredStore:
    """The store of a running sidecar, seen by somebody who may write what the sidecar did not."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = DiskStore(root, write=False)
        self._files = DurableFiles(root)

    def latest(self, session: SessionId) -> Manifest:
        """The snapshot that a restore of this session would use. StoreError when there is none."""
        found = self._store.latest(session)
        if found is None:
            raise StoreError(f"session {session}: its snapshot is not in {self._root}; see the sidecar's log")
        return found

    def with_flipped_bit(self, snapshot: Manifest, chance: Random) -> tuple[Manifest, Flipped]:
        """The same snapshot, but for one bit of one value in one block that is full (the only one, where none is)."""
        full = max(snapshot.kv_len // snapshot.block_tokens, 1)
        block = chance.randrange(full)
        raw = bytearray(self._store.get_chunk(snapshot.chunks[block]))
        byte = _ordinary_value(raw, chance)
        raw[byte] ^= HIGH_EXPONENT_BIT
        name, stored = chunk.encode(raw)
        self._write_chunk(name, stored)
        chunks = (*snapshot.chunks[:block], name, *snapshot.chunks[block + 1 :])
        return replace(snapshot, chunks=chunks), Flipped(block, byte)

    def publish(self, snapshot: Manifest, session: SessionId) -> None:
        """Make it the latest snapshot of `session`, whoever's it was. Blocks, for a moment: meant for a thread."""
        now_s = time.time()
        stored = replace(snapshot, session=session, created_at=now_s)
        folder = self._root / "sessions" / session
        path = folder / f"{stored.generation:010d}-{stored.kv_len:010d}-{int(now_s * 1e6):017d}"
        try:
            self._files.make_folder(folder)
            self._files.write(path, manifest.encode(stored))
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}; check the store's folder and the disk") from error

    def _write_chunk(self, name: str, stored: bytes) -> None:
        path = self._root / "chunks" / name[:2] / name
        try:
            self._files.write(path, stored)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}; check the store's folder and the disk") from error


def with_shifted_cut(snapshot: Manifest, filler: int) -> Manifest:
    """The full blocks of a snapshot, said to reach one position further than they do. Pure.

    What is stored after the last token has no KV of its own there, but for the bytes of block `filler`. ValueError when
    the full blocks do not reach past the prompt, or the snapshot ends with them.
    """
    full = snapshot.kv_len // snapshot.block_tokens
    kv_len = full * snapshot.block_tokens + 1
    outputs = snapshot.outputs[: kv_len - snapshot.prompt_len + 1]
    if kv_len <= snapshot.prompt_len or kv_len > snapshot.kv_len:
        raise ValueError(f"a snapshot of {snapshot.kv_len} positions has no cut to shift")
    return replace(
        snapshot, kv_len=kv_len, outputs=outputs, chunks=(*snapshot.chunks[:full], snapshot.chunks[filler % full])
    )


def _ordinary_value(raw: bytes | bytearray, chance: Random) -> int:
    """The high byte of some value of ordinary size; any high byte where there seems to be none."""
    places = range(HIGH_BYTE, len(raw), 4)
    tried = [chance.choice(places) for _ in range(_TRIES)] if places else [len(raw) - 1]
    return next((place for place in tried if raw[place] & 0x7F in _ORDINARY), tried[0])
