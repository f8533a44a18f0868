"""The client's gaps: how long an interrupted stream was silent. Pure.

A stream that was interrupted k times has k gaps: the longest silences among those that a fault fell into or that began
right behind one, for last tokens (of the dying engine, or only journaled) still arrive. A silence before the first
token counts from the fault.
"""

from collections.abc import Sequence
from itertools import pairwise

from .live import Mark

BEHIND_S = 2.0


def silences(sent_s: float, marks: Sequence[Mark]) -> list[tuple[float, float]]:
    """(from, to) of each wait for tokens, the one for the first included."""
    times = [sent_s, *(mark.at_s for mark in marks)]
    return list(pairwise(times))


def gaps_of(sent_s: float, marks: Sequence[Mark], fault_times_s: Sequence[float], interruptions: int) -> list[float]:
    """The gap of each interruption, in order of time; empty where nothing came after one."""
    waits = silences(sent_s, marks)
    near: dict[int, float] = {}
    for at_s in fault_times_s:
        touched = [
            (_length(index, wait, at_s), index)
            for index, wait in enumerate(waits)
            if wait[1] > at_s and wait[0] < at_s + BEHIND_S
        ]
        if touched:
            length_s, index = max(touched)
            near[index] = max(length_s, near.get(index, 0.0))
    if len(near) < interruptions:
        # Interrupted by what nobody planned: its longest other silences.
        others = sorted((b - a, i) for i, (a, b) in enumerate(waits) if i and i not in near)
        for length_s, index in others[::-1][: interruptions - len(near)]:
            near[index] = length_s
    longest = sorted(near.items(), key=lambda item: item[1], reverse=True)[:interruptions]
    return [length_s for _, length_s in sorted(longest)]


def _length(index: int, wait: tuple[float, float], at_s: float) -> float:
    return wait[1] - (max(wait[0], at_s) if index == 0 else wait[0])
