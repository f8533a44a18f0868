"""How long to wait before the next try. Pure: chance is an argument.

Invariant: each wait is between half of its step and the whole, steps double up to the largest, so many who lost the
same service do not all come back at once.
"""

from collections.abc import Callable


class Backoff:
    """The waits of one series of failures; `draw` gives numbers in [0, 1)."""

    __slots__ = ("_draw", "_first_s", "_largest_s", "_step_s")

    def __init__(self, first_s: float, largest_s: float, draw: Callable[[], float]) -> None:
        self._first_s = first_s
        self._largest_s = largest_s
        self._draw = draw
        self._step_s = first_s

    def wait_s(self) -> float:
        """The next wait; the one after it is longer."""
        step_s = self._step_s
        self._step_s = min(self._largest_s, step_s * 2)
        return step_s * (0.5 + 0.5 * self._draw())

    def succeeded(self) -> None:
        """The series is over."""
        self._step_s = self._first_s
