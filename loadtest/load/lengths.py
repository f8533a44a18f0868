"""How long prompts and answers are: fixed, uniform or lognormal, drawn from a seed. Pure.

Owns the words for it (`128`, `uniform:16-256`, `lognormal:200,0.6`, `lognormal:200,0.6:16-1024`). Invariant: a length
is never below 1 nor above `LENGTH_MAX`.
"""

import math
from dataclasses import dataclass
from random import Random

from ...session.errors import ConfigError

LENGTH_MAX = 1_000_000
_WORDS = "expected a number, uniform:LEAST-MOST, or lognormal:MEDIAN,SIGMA[:LEAST-MOST]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts; `sigma` 0 and `least` = `most` is a fixed one."""

    text: str
    least: int
    most: int
    median: float = 0.0
    sigma: float = 0.0

    def draw(self, chance: Random) -> int:
        """One length. Takes one number from `chance`, whatever the kind, so that draws stay in step."""
        at = chance.random()
        if self.median:
            wanted = self.median * math.exp(self.sigma * _normal_quantile(at))
        else:
            wanted = self.least + at * (self.most - self.least + 1) - 0.5
        return min(max(round(wanted), self.least), self.most)


def parse_lengths(text: str, flag: str) -> Lengths:
    """The distribution that a flag names; ConfigError says what is possible."""
    kind, _, rest = text.strip().partition(":")
    try:
        match kind:
            case "uniform":
                least, most = _range(rest)
                return Lengths(text, least, most)
            case "lognormal":
                shape, _, limits = rest.partition(":")
                median, sigma = (float(word) for word in shape.split(","))
                least, most = _range(limits) if limits else (1, LENGTH_MAX)
                if not (0 < median <= LENGTH_MAX and 0 <= sigma <= 10):
                    raise ValueError
                return Lengths(text, least, most, median, sigma)
            case "fixed":
                least, most = _range(f"{rest}-{rest}")
                return Lengths(text, least, most)
            case _:
                least, most = _range(f"{text}-{text}")
                return Lengths(text, least, most)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is no distribution of lengths; {_WORDS}") from error


def _range(text: str) -> tuple[int, int]:
    least, most = (int(word) for word in text.split("-"))
    if not 1 <= least <= most <= LENGTH_MAX:
        raise ValueError(text)
    return least, most


def _normal_quantile(at: float) -> float:
    """The standard normal distribution's quantile, by bisection of its error function: exact enough, and one draw."""
    low, high = -8.0, 8.0
    for _ in range(48):
        middle = (low + high) / 2
        if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < at:
            low = middle
        else:
            high = middle
    return (low + high) / 2
