"""Snapshots that are wrong on purpose: well-formed to the last checksum, and wrong in exactly the way that is said."""

import struct
import time
from pathlib import Path
from random import Random

import pytest

from midstream.loadtest.verify.doctored import DoctoredStore, with_shifted_cut
from midstream.session.disk_store import DiskStore
from midstream.session.errors import StoreError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest, decode, encode

DONOR, VICTIM = SessionId("d" * 32), SessionId("e" * 32)
BLOCK_TOKENS, BLOCK_BYTES = 4, 256


def block(number: int) -> bytes:
    """Floats of ordinary size, as keys and values are."""
    chance = Random(number)
    return struct.pack(f"<{BLOCK_BYTES // 4}f", *(chance.gauss(0, 0.5) for _ in range(BLOCK_BYTES // 4)))


def snapshot(store: DiskStore, *, prompt: int = 5, outputs: int = 8) -> Manifest:
    kv_len = prompt + outputs - 1
    with store.begin() as draft:
        chunks = tuple(draft.put_chunk(block(i)) for i in range(-(-kv_len // BLOCK_TOKENS)))
        made = Manifest(
            DONOR,
            1,
            {"engine": "e"},
            "f" * 32,
            BLOCK_TOKENS,
            BLOCK_BYTES,
            prompt,
            "a" * 32,
            kv_len,
            tuple(range(100, 100 + outputs)),
            chunks,
            time.time(),
        )
        draft.publish(made)
    return made


def changed_bits(one: bytes, other: bytes) -> list[tuple[int, int]]:
    return [(i, a ^ b) for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_one_bit_of_one_block_is_flipped_and_every_checksum_fits(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    good = snapshot(store)
    for seed in range(20):
        wrong, spot = DoctoredStore(tmp_path).with_flipped_bit(good, Random(seed))
        differing = [i for i, pair in enumerate(zip(good.chunks, wrong.chunks, strict=True)) if pair[0] != pair[1]]
        assert differing == [spot.block]
        # Read as a restore reads it: a chunk whose bytes were not proven would be an error.
        [(byte, bits)] = changed_bits(block(spot.block), store.get_chunk(wrong.chunks[spot.block]))
        assert (byte, bits) == (spot.byte, 0x40)
        old, new = (
            struct.unpack_from("<f", raw, byte - 3)[0]
            for raw in (block(spot.block), store.get_chunk(wrong.chunks[spot.block]))
        )
        assert abs(new) > 1e30 * abs(old)
    store.close()


def test_only_full_blocks_are_doctored_where_there_are_any(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    good = snapshot(store, prompt=5, outputs=2)  # 6 positions: one full block, and half of another
    spots = {DoctoredStore(tmp_path).with_flipped_bit(good, Random(seed))[1].block for seed in range(10)}
    assert spots == {0}
    short = snapshot(store, prompt=2, outputs=2)
    assert DoctoredStore(tmp_path).with_flipped_bit(short, Random(1))[1].block == 0
    store.close()


def test_what_is_published_is_the_latest_snapshot_of_the_session_it_was_made_for(tmp_path: Path) -> None:
    with_writer = DiskStore(tmp_path)  # a sidecar's, which goes on writing
    good = snapshot(with_writer)
    doctored = DoctoredStore(tmp_path)
    wrong, _ = doctored.with_flipped_bit(good, Random(3))
    doctored.publish(wrong, VICTIM)
    found = with_writer.latest(VICTIM)
    assert found is not None
    assert (found.session, found.chunks, found.outputs) == (VICTIM, wrong.chunks, good.outputs)
    assert with_writer.latest(DONOR) == good
    assert doctored.latest(DONOR) == good
    with_writer.close()


def test_a_shifted_cut_claims_one_position_more_than_its_full_blocks_have(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    good = snapshot(store, prompt=5, outputs=8)  # 12 positions, 3 full blocks
    longer = snapshot(store, prompt=5, outputs=10)  # 14 positions
    with pytest.raises(ValueError, match="no cut to shift"):
        with_shifted_cut(good, 0)
    wrong = with_shifted_cut(longer, 0)
    assert (wrong.kv_len, len(wrong.outputs)) == (13, 9)
    assert wrong.outputs == longer.outputs[:9]
    assert wrong.chunks == (*longer.chunks[:3], longer.chunks[0])
    assert decode(encode(wrong)) == wrong
    assert with_shifted_cut(longer, 5).chunks[-1] == longer.chunks[2]
    store.close()


def test_a_snapshot_that_ends_within_the_prompt_has_no_cut_to_shift(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(ValueError, match="no cut to shift"):
        with_shifted_cut(snapshot(store, prompt=6, outputs=2), 0)
    store.close()


def test_a_session_without_a_snapshot_and_a_store_that_cannot_be_written_are_said_to_be_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    good = snapshot(store)
    doctored = DoctoredStore(tmp_path)
    with pytest.raises(StoreError, match="its snapshot is not in"):
        doctored.latest(VICTIM)
    (tmp_path / "sessions" / VICTIM).write_text("in the way")
    with pytest.raises(StoreError, match="check the store's folder"):
        doctored.publish(good, VICTIM)
    store.close()
