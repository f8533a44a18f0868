"""Manifests: one encoding, checked, and parts that agree."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.errors import CorruptError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest, decode, encode

MANIFEST = Manifest(
    session=SessionId("a" * 32),
    generation=3,
    key={"model": "m", "layers": 30, "lora": None},
    fingerprint="f" * 32,
    block_tokens=4,
    block_bytes=4096,
    prompt_len=5,
    prompt_hash="b" * 32,
    kv_len=7,
    outputs=(11, 12, 13),
    chunks=("c" * 32, "d" * 32),
    created_at=1234.5,
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decode(encode(MANIFEST)) == MANIFEST


def test_one_of_several_ranks_says_how_many_and_of_which_step_and_one_of_a_single_rank_does_not() -> None:
    ranked = replace(MANIFEST, ranks=2, step=77)
    assert decode(encode(ranked)) == ranked
    assert b'"ranks":2' in encode(ranked)
    assert b"ranks" not in encode(MANIFEST)
    assert b"step" not in encode(MANIFEST)
    with pytest.raises(ValueError, match="no step 77 in common"):
        replace(MANIFEST, step=77)


def test_kv_that_was_computed_again_is_told_and_other_kv_is_written_as_ever() -> None:
    again = replace(MANIFEST, recomputed=True)
    assert decode(encode(again)) == again
    assert b"recomputed" not in encode(MANIFEST)


@pytest.mark.parametrize(
    "told",
    [
        {"recomputed": False},
        {"recomputed": 1},
        {"ranks": 1, "step": 0},
        {"ranks": 2},
        {"step": 3},
        {"ranks": "2", "step": 3},
    ],
)
def test_ranks_that_are_told_otherwise_are_not_believed(told: dict[str, Any]) -> None:
    body = json.loads(encode(MANIFEST).split(b"\n")[1]) | told
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
    with pytest.raises(CorruptError, match="not written by this midstream"):
        decode(b"midstream-manifest " + digest + b"\n" + text + b"\n")


@given(st.integers(1, 40), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 8))
def test_every_manifest_has_one_encoding(prompt_len: int, outputs: list[int], block_tokens: int) -> None:
    kv_len = prompt_len + len(outputs) - 1
    chunks = tuple(f"{n:032x}" for n in range(-(-kv_len // block_tokens)))
    manifest = replace(
        MANIFEST,
        prompt_len=prompt_len,
        outputs=tuple(outputs),
        kv_len=kv_len,
        block_tokens=block_tokens,
        chunks=chunks,
    )
    stored = encode(manifest)
    assert encode(decode(stored)) == stored


def test_every_flipped_bit_is_noticed() -> None:
    stored = encode(MANIFEST)
    for position in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode(bytes(damaged))


def test_every_cut_and_every_addition_is_noticed() -> None:
    stored = encode(MANIFEST)
    for length in range(len(stored)):
        with pytest.raises(CorruptError):
            decode(stored[:length])
    with pytest.raises(CorruptError):
        decode(stored + b"\n")


@given(st.binary(max_size=300))
def test_random_bytes_are_never_a_manifest(stored: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(stored)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_len": 8},
        {"kv_len": 6},
        {"outputs": ()},
        {"prompt_len": 0},
        {"chunks": ()},
        {"block_tokens": 0},
        {"chunks": ("c",)},
    ],
)
def test_parts_that_do_not_agree_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"are not what|do not follow"):
        replace(MANIFEST, **changes)


def forged(**changes: Any) -> bytes:
    """A manifest with a right checksum and wrong content."""
    body = json.loads(encode(MANIFEST).partition(b"\n")[2])
    text = json.dumps(body | changes, sort_keys=True, separators=(",", ":")).encode()
    return b"midstream-manifest " + hashlib.blake2b(text, digest_size=32).hexdigest().encode() + b"\n" + text + b"\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"session": "../.."},
        {"session": 7},
        {"outputs": 7},
        {"outputs": ["a", "b", "c"]},
        {"outputs": [1, 2, -1]},
        {"chunks": [1, 2]},
        {"chunks": ["../../../../etc/passwd", "x"]},
        {"generation": "3"},
        {"kv_len": None},
        {"key": []},
        {"created_at": "now"},
        {"extra": 1},
        {"fingerprint": 7},
        {"block_bytes": True},
    ],
)
def test_a_manifest_of_another_version_or_shape_is_refused_whatever_its_checksum(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        decode(forged(**changes))
