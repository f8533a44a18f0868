"""What the plots of all pages are made with: the frame of an inline SVG, and a logarithmic axis. Pure.

Owns where a value lies on such an axis. Colours, sizes and shapes are each page's own.
"""

import math
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class LogAxis:
    """From `left` to `right` in pixels, and from `low` to `high` in powers of ten; `high` is above `low`."""

    left: float
    right: float
    low: float
    high: float

    def at(self, value: float) -> float:
        """Where a value above 0 lies."""
        return self.left + (math.log10(value) - self.low) / (self.high - self.low) * (self.right - self.left)


def frame(width: float, height: float, label: str, style: str) -> str:
    """The beginning of a picture; `label` says what it is to who cannot see it."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" {style} role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
