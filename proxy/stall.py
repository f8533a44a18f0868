"""When a stream that says nothing counts as stalled: relative to its own rhythm. Pure: time is an argument.

Owns the account of a stream's gaps between tokens. Invariant: no verdict before the first token (a long prefill is no
stall), and none for answers that are not streamed (they never make a `Rhythm`). A replay is no token of a rhythm: what
follows it is a wait for room and KV, bounded by the ceiling alone. It does not act on its verdict.
"""

from dataclasses import dataclass, replace

# The account forgets a slow gap by half after about 70 tokens: engines pause for others' prefills now and then.
_FORGET = 0.99


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """A stall is a silence longer than `factor` x the slowest recent gap, within the two bounds."""

    floor_s: float = 15.0
    factor: float = 20.0
    ceiling_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.ceiling_s or self.factor < 1:
            raise ValueError(
                f"stall policy: expected 0 < floor_s ({self.floor_s}) <= ceiling_s ({self.ceiling_s}) "
                f"and factor ({self.factor}) >= 1"
            )

    def of_a_node(self, *, sees_tokens: bool) -> "StallPolicy":
        """For a stream whose sender has this policy for its own engines, and the first word on their silence.

        Where not every token is seen, a parser there may hold all of a long call back; only the node knows of that.
        """
        ceiling_s = 2 * self.ceiling_s
        return replace(
            self, floor_s=2 * self.floor_s if sees_tokens else ceiling_s, factor=2 * self.factor, ceiling_s=ceiling_s
        )


class Rhythm:
    """The rhythm of one stream: tell it of tokens and ask it when silence becomes a stall."""

    __slots__ = ("_last_s", "_policy", "_slow_s", "_waits")

    def __init__(self, policy: StallPolicy) -> None:
        self._policy = policy
        self._last_s: float | None = None
        self._slow_s = 0.0
        self._waits = False

    def replayed(self, now_s: float) -> None:
        """Old tokens arrived again; the engine has yet to make room for the session and get its KV."""
        self._last_s = now_s
        self._waits = True

    def token(self, now_s: float) -> None:
        """Tokens arrived (several in one read count as one beat)."""
        if self._waits:
            self._waits = False
        elif self._last_s is not None:
            gap_s = now_s - self._last_s
            # A maximum that decays: a slow quantile without keeping the gaps.
            self._slow_s = max(gap_s, self._slow_s * _FORGET)
        self._last_s = now_s

    def resume(self, now_s: float) -> None:
        """Listening again after a pause of the proxy's own (a slow client): that silence was not the engine's."""
        if self._last_s is not None:
            self._last_s = now_s

    def limit_s(self) -> float:
        """How long a silence may be."""
        policy = self._policy
        if self._waits:
            return policy.ceiling_s
        return min(policy.ceiling_s, max(policy.floor_s, policy.factor * self._slow_s))

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds until the silence is a stall (0 or less: it is one); None before the first token."""
        if self._last_s is None:
            return None
        return self._last_s + self.limit_s() - now_s
