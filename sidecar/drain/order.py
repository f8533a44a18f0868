"""In which order sessions leave, and which may end where they are. Pure.

Owns what a session costs to be lost, as far as its engine's arena tells: the positions that would have to be computed
again. Invariant: nothing is called short unless its request says how long it can get, and its own pace so far says that
this is soon.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# A pace is one only after so many tokens.
_PACED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Leaving:
    """One session. `outputs`: written so far; `left_s`: until it must be over at its present pace, None: unknown.

    `key`: the digest of its worker's compatibility key, "" where that has none.
    """

    session: str
    positions: int
    outputs: int
    left_s: float | None = None
    key: str = ""

    def ends_within(self, short_s: float) -> bool:
        """Whether it ends by itself so soon that it is not worth a move."""
        return self.left_s is not None and self.left_s < short_s

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def left_s(outputs: int, output_max: int | None, age_s: float) -> float | None:
    """How long a session of that age has left at most."""
    if output_max is None or outputs < _PACED_TOKENS or age_s <= 0:
        return None
    return max(0, output_max - outputs) * age_s / outputs


def dearest_first(sessions: Iterable[Leaving], short_s: float) -> list[Leaving]:
    """Those that have to move: what would cost most to compute again comes first."""
    moving = [s for s in sessions if not s.ends_within(short_s)]
    return sorted(moving, key=lambda s: (-s.positions, s.session))


def leaving_of(body: object) -> list[Leaving]:
    """What a node tells of its sessions. ValueError says what is wrong with it."""
    if not isinstance(body, list):
        raise ValueError("sessions: expected a list")
    found = []
    for item in body:
        try:
            left = item["left_s"]
            found.append(
                Leaving(
                    str(item["session"]),
                    int(item["positions"]),
                    int(item["outputs"]),
                    None if left is None else float(left),
                    str(item["key"]),
                )
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"sessions: {error}") from error
    return found
