"""Chunks: what comes out is what went in, or a CorruptError."""

import pickle
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.chunk import HEADER_BYTES, chunk_name, decode, encode
from midstream.session.errors import CorruptError


def kv_like(count: int) -> bytes:
    """Floats around zero, as KV is."""
    chance = random.Random(3)
    return struct.pack(f"<{count}f", *(chance.gauss(0, 0.3) for _ in range(count)))


@given(st.binary(min_size=1, max_size=5000))
def test_a_chunk_comes_back_bit_for_bit(raw: bytes) -> None:
    name, stored = encode(raw)
    assert name == chunk_name(raw)
    assert decode(name, stored) == raw


@given(st.binary(min_size=1, max_size=300), st.binary(max_size=400))
def test_random_bytes_are_never_a_chunk(raw: bytes, other: bytes) -> None:
    name, stored = encode(raw)
    if other != stored:
        with pytest.raises(CorruptError):
            decode(name, other)
        with pytest.raises(CorruptError):
            decode(name, stored + b"x" + other)


def test_every_flipped_bit_is_noticed() -> None:
    name, stored = encode(kv_like(40))
    for position in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptError, match=name):
                decode(name, bytes(damaged))


def test_every_cut_is_noticed() -> None:
    name, stored = encode(kv_like(40))
    for length in range(len(stored)):
        with pytest.raises(CorruptError):
            decode(name, stored[:length])


def test_a_whole_chunk_under_the_name_of_another_is_refused() -> None:
    name, _ = encode(b"one block")
    _, stored = encode(b"another block")
    with pytest.raises(CorruptError, match="the file holds"):
        decode(name, stored)


def test_a_damaged_size_is_never_allocated() -> None:
    name, stored = encode(b"x" * 1000)
    for size in (0, 1, 999, 1001, 1 << 62):
        forged = stored[:8] + struct.pack("<Q", size) + stored[16:]
        with pytest.raises(CorruptError):
            decode(name, forged)


def test_a_pickle_is_only_bytes() -> None:
    with pytest.raises(CorruptError):
        decode("0" * 32, pickle.dumps(["x"] * 100))


@pytest.mark.parametrize("raw", [b""])
def test_an_empty_block_is_no_chunk(raw: bytes) -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        encode(raw)


def test_the_header_has_the_size_that_the_format_promises() -> None:
    assert HEADER_BYTES == 48
