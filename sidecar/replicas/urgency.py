"""Which session's snapshot is brought elsewhere next. Pure.

The one whose loss would cost an engine most, per byte that is still to be sent: what is lost of a session has to be
computed again, a prompt many positions at a time, each output in a step of its own, and both the dearer the longer what
came before. Whoever waits gains, so that nobody waits for ever; of equals the newer snapshot goes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# The time of an engine, in prompt positions: what one output costs beside other sessions' outputs in the same step, and
# after how many positions the attention to them costs as much as everything else.
OUTPUT_COST = 20.0
ATTENTION_POSITIONS = 16_384
# Who has waited for so long counts twice as much.
WAIT_DOUBLES_S = 10.0


@dataclass(frozen=True, slots=True)
class Behind:
    """A session of which positions are missing elsewhere: [covered, kv_len)."""

    session: str
    prompt_len: int
    kv_len: int
    covered: int
    missing_bytes: int
    created_at: float
    waited_s: float


def cost(prompt_len: int, first: int, end: int) -> float:
    """What it costs an engine to compute the positions [first, end), in prompt positions."""
    between = min(max(prompt_len, first), end)
    return _each(first, between) + OUTPUT_COST * _each(between, end)


def _each(first: int, end: int) -> float:
    return (end - first) * (1 + (first + end) / 2 / ATTENTION_POSITIONS)


def urgency(behind: Behind) -> float:
    """The most urgent has the highest."""
    lost = cost(behind.prompt_len, behind.covered, behind.kv_len)
    return lost / max(1, behind.missing_bytes) * (1 + behind.waited_s / WAIT_DOUBLES_S)


def most_urgent(candidates: Sequence[Behind]) -> Behind | None:
    """The next one, or None."""
    return max(candidates, key=lambda b: (urgency(b), b.created_at, b.session), default=None)
