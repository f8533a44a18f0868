"""What became of an answer's tokens, beside the undisturbed answers. Pure.

Two questions, kept apart. *Lost or repeated* is about the stream: tokens that the engine counted and the client did not
get, or got again; and a stream that goes on as the undisturbed one does, but shifted. *Different* is about the engine:
batching alone changes the numerics of real engines, so where the undisturbed answers differ among themselves a
difference is variance, and neither a pass nor a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SHIFT_MAX = 32
# So many tokens must go on alike before a shift is believed; fewer may be alike by chance.
SHIFT_PROOF = 12


class Same(StrEnum):
    """How an answer compares with the undisturbed ones."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    VARIANCE = "variance"
    UNKNOWN = "unknown"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`first_difference` is an index of output tokens, -1 for none; `missing` is what a broken answer lacks."""

    same: Same
    lost: int = 0
    repeated: int = 0
    first_difference: int = -1
    different_tokens: int = 0
    missing: int = 0


def judge(
    got: Sequence[int], counted: int | None, controls: Sequence[Sequence[int]], *, is_whole: bool, interrupted: bool
) -> Verdict:
    """The verdict on `got`; `counted` is the engine's own count of the whole answer (usage)."""
    wanted = max(controls, key=lambda control: common_prefix(got, control), default=None)
    if not is_whole:
        missing = 0 if wanted is None else max(len(wanted) - len(got), 0)
        return Verdict(Same.BROKEN, missing=missing)
    lost = max((counted or 0) - len(got), 0)
    repeated = max(len(got) - counted, 0) if counted is not None else 0
    if wanted is None:
        return Verdict(Same.UNKNOWN, lost, repeated)
    if list(got) == list(wanted):
        return Verdict(Same.IDENTICAL, lost, repeated)
    first = common_prefix(got, wanted)
    varies = len({tuple(control) for control in controls}) > 1
    if interrupted and not varies:
        shifted = shift(got, wanted, first)
        lost, repeated = max(lost, -shifted), max(repeated, shifted)
    return Verdict(
        same=Same.VARIANCE if varies else Same.DIFFERENT,
        lost=lost,
        repeated=repeated,
        first_difference=first,
        different_tokens=sum(a != b for a, b in zip(got, wanted, strict=False)) + abs(len(got) - len(wanted)),
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are alike."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def shift(got: Sequence[int], wanted: Sequence[int], first: int) -> int:
    """By how many tokens `got` lags behind `wanted` from `first` on (below 0: is ahead of it); 0 if it does neither."""
    for by in range(1, SHIFT_MAX + 1):
        if _alike(got[first + by :], wanted[first:]):
            return by
        if _alike(got[first:], wanted[first + by :]):
            return -by
    return 0


def _alike(one: Sequence[int], other: Sequence[int]) -> bool:
    count = min(len(one), len(other))
    return count >= SHIFT_PROOF and list(one[:count]) == list(other[:count])
