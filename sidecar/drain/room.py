"""Places that this node holds for sessions that are to come from another one.

Owns what was promised, and until when. Invariants: what is promised is no more than what is free, workers' places and
KV blocks alike, as far as they are known; a promise ends when its session comes, when it is given back, or in time; at
most `HELD_MAX` are kept. It reserves nothing in an engine: sessions of others may take what was free a moment ago, so a
promise makes a refusal after the cut rare, and not impossible. Time is an argument.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...session.errors import Refused

HELD_S = 30.0
HELD_MAX = 4096
# What a session may write while it is being moved.
MORE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Free:
    """What one worker has left. `key`: the digest of its compatibility key; `tokens`: None where that is not known."""

    key: str
    places: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class _Held:
    tokens: int
    until_s: float


class Rooms:
    """The promises of one node."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def hold(self, session: str, tokens: int, keys: Collection[str], free: Iterable[Free], now_s: float) -> float:
        """Promise a place with KV of so many positions, on a worker with one of these keys; for how long. Raises
        Refused."""
        self._forget(now_s)
        self._held.pop(session, None)
        able = [worker for worker in free if worker.key in keys]
        if not able:
            raise Refused("no_key", "no worker here has a compatibility key of that session's; choose another node")
        places = sum(max(worker.places, 0) for worker in able) - len(self._held)
        # What was promised already may all be for the roomiest worker, which is where a session goes.
        promised = sum(held.tokens for held in self._held.values())
        roomiest = max(float("inf") if worker.tokens is None else worker.tokens for worker in able)
        if places < 1 or roomiest - promised < tokens or len(self._held) >= HELD_MAX:
            raise Refused(
                "no_room",
                f"{max(places, 0)} places and KV for {max(roomiest - promised, 0):.0f} positions are free here, and "
                f"{tokens} are wanted; choose another node",
                retry_after_s=5,
            )
        self._held[session] = _Held(tokens, now_s + HELD_S)
        return HELD_S

    def release(self, session: str) -> None:
        """It comes, or will not come."""
        self._held.pop(session, None)

    def arrived(self, sessions: Collection[str]) -> None:
        """These are here: what they take is free no more, and is not to be counted twice."""
        for session in [session for session in self._held if session in sessions]:
            del self._held[session]

    def count(self, now_s: float) -> int:
        """How many are promised."""
        self._forget(now_s)
        return len(self._held)

    def _forget(self, now_s: float) -> None:
        for session in [session for session, held in self._held.items() if held.until_s <= now_s]:
            del self._held[session]
