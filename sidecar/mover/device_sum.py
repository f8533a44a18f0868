"""The sum of a block on a GPU: its definition, and a slow implementation of it for those who have no GPU.

A block's bytes, all planes in order, are read as vectors of two little-endian words of 64 bits. The sum is
    SEED + sum over all vectors i of mix(lo, hi, i)      (modulo 2**64)
    mix(lo, hi, i) = round(round(round(round(lo ^ (KEY + i * STEP), A) ^ hi, B), C), D)
    round(x, m) = y ^ (y >> 32) with y = x * m modulo 2**64, m odd
An addition can be carried out in any order, so threads and thread blocks need not wait for each other; the order of
the words is in `i`, which every vector is mixed with. Each round is a bijection, so mix is one in `lo` and in `hi`: a
change that is confined to one word changes the sum for certain. Of everything else (words or blocks that were swapped,
zeroed or overwritten) mix makes differences that look random, also of bits at the top of a word, which a multiplication
alone would leave there: it goes unnoticed once in about 2**60 times. It is no signature: it is against faults, not
against forgers.
"""

import struct

VECTOR_BYTES = 16
SEED = 0x6D69_6473_7472_6561
KEY = 0x243F_6A88_85A3_08D3
STEP = 0x9E37_79B9_7F4A_7C15
A = 0xBF58_476D_1CE4_E5B9
B = 0x94D0_49BB_1331_11EB
C = 0xFF51_AFD7_ED55_8CCD
D = 0xC4CE_B9FE_1A85_EC53

_WORD = (1 << 64) - 1
_VECTOR = struct.Struct("<QQ")


def reference_sum(raw: bytes | memoryview) -> int:
    """The sum of a block's bytes; their number must be a multiple of VECTOR_BYTES. A few MB a second."""
    total = SEED
    for index, (low, high) in enumerate(_VECTOR.iter_unpack(raw)):
        total += _mix(low, high, index)
    return total & _WORD


def _mix(low: int, high: int, index: int) -> int:
    mixed = _round(low ^ ((KEY + index * STEP) & _WORD), A)
    return _round(_round(_round(mixed ^ high, B), C), D)


def _round(value: int, factor: int) -> int:
    product = value * factor & _WORD
    return product ^ product >> 32
