"""Verdicts on an answer, beside the undisturbed one. Pure."""

from collections.abc import Sequence
from difflib import SequenceMatcher


def lost_and_duplicated(wanted: Sequence[int], got: Sequence[int]) -> tuple[int, int]:
    """How many of the wanted tokens are missing, and how many tokens are there that should not be."""
    if list(wanted) == list(got):
        return 0, 0
    lost = extra = 0
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, wanted, got, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += i2 - i1
            extra += j2 - j1
    return lost, extra
