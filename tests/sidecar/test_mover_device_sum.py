"""The definition of a block's sum on a GPU, and the kernels' text that must agree with it."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.errors import PoolError
from midstream.sidecar.mover import device_kernels, device_sum
from midstream.sidecar.mover.device import planes_of
from midstream.sidecar.mover.device_sum import reference_sum

VECTORS = st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 2), min_size=2, max_size=40)


def raw_of(vectors: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<QQ", *vector) for vector in vectors)


def test_the_sum_of_nothing_is_the_seed_and_sums_stay_what_they_are() -> None:
    assert reference_sum(b"") == device_sum.SEED
    assert reference_sum(bytes(range(256))) == GOLDEN
    assert reference_sum(memoryview(bytes(range(256)))) == GOLDEN


# A sum is kept in memory and never longer than a mover lives; still, a change of the definition should be on purpose.
GOLDEN = 0x628B_8AFF_02EE_FD7B


@given(VECTORS, st.data())
def test_a_change_within_one_word_always_changes_the_sum(vectors: list[tuple[int, int]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(vectors) - 1))
    change = data.draw(st.integers(1, 2**64 - 1))
    low, high = vectors[at]
    for changed in ((low ^ change, high), (low, high ^ change)):
        assert reference_sum(raw_of([*vectors[:at], changed, *vectors[at + 1 :]])) != reference_sum(raw_of(vectors))


@given(VECTORS, st.data())
def test_swapped_zeroed_and_shifted_words_change_the_sum(vectors: list[tuple[int, int]], data: st.DataObject) -> None:
    whole = reference_sum(raw_of(vectors))
    one, other = data.draw(st.lists(st.integers(0, 2 * len(vectors) - 1), min_size=2, max_size=2, unique=True))
    words = [word for vector in vectors for word in vector]
    swapped, zeroed = list(words), list(words)
    swapped[one], swapped[other] = words[other], words[one]
    zeroed[one] = zeroed[other] = 0
    for changed in (swapped, zeroed, [*words[2:], *words[:2]]):
        if changed != words:
            assert reference_sum(struct.pack(f"<{len(words)}Q", *changed)) != whole


def test_the_same_bit_changed_in_any_two_words_changes_the_sum() -> None:
    # Signs of numbers: what a sum of products alone would miss half of the time.
    raw = bytearray(random.Random(1).randbytes(512))
    whole = reference_sum(raw)
    for bit in (0, 15, 31, 32, 47, 63):
        for one in range(64):
            for other in range(one):
                changed = bytearray(raw)
                for word in (one, other):
                    changed[8 * word + bit // 8] ^= 1 << bit % 8
                assert reference_sum(changed) != whole


def test_sums_of_random_blocks_are_spread_over_all_bits() -> None:
    chance = random.Random(2)
    sums = [reference_sum(chance.randbytes(64)) for _ in range(4000)]
    for bit in range(64):
        assert 1800 < sum(value >> bit & 1 for value in sums) < 2200


def test_the_kernels_mix_with_the_constants_of_the_definition() -> None:
    for constant in (device_sum.KEY, device_sum.STEP, device_sum.A, device_sum.B, device_sum.C, device_sum.D):
        assert f"{constant:#x}ull" in device_kernels.SOURCE
    assert all(factor % 2 for factor in (device_sum.A, device_sum.B, device_sum.C, device_sum.D))


def test_planes_are_packed_with_how_much_of_a_block_comes_before_them() -> None:
    planes = planes_of([(0, 64, 32), (1024, 2**20, 2**17 + 16), (2**40, 16, 16)])
    assert (planes.count, planes.tiles) == (3, 3)
    assert list(device_kernels.PLANE.iter_unpack(planes.packed)) == [
        (0, 64, 2, 0),
        (1024, 2**20, 2**13 + 1, 2),
        (2**40, 16, 1, 2**13 + 3),
    ]


@pytest.mark.parametrize("span", [(8, 64, 32), (16, 40, 32), (16, 64, 24)])
def test_planes_that_vectors_do_not_fit_are_refused_by_name(span: tuple[int, int, int]) -> None:
    with pytest.raises(PoolError, match="units of 16 bytes"):
        planes_of([span])
