"""Where the time of many restores goes that come at once: one account from the first of them to the last.

Owns the sums, and the line that says them. Invariant: the account is of one burst, which ends when no restore is left.
Pure: it is told each time. Decides nothing.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallTimes:
    """One call that copies for several restores: handed to a thread, begun there, on its way by itself, and over."""

    handed_s: float
    begun_s: float = 0.0
    sent_s: float = 0.0
    over_s: float = 0.0


@dataclass(slots=True)
class Burst:
    """What was told since the first of the restores that are running now; all times are of one clock, in seconds.

    `plan_s` and `answer_s` are the event loop's, `hand_s` is until a thread has begun, `launch_s` until it has sent its
    work, `back_s` from the end of the work until the loop has seen it; all of these are sums. `idle_s` is how long no
    call was on its way between the first and the last one: what a GPU had nothing to do.
    """

    began_s: float
    sessions: int = 0
    size_bytes: int = 0
    plan_s: float = 0.0
    answer_s: float = 0.0
    came_s: float = 0.0
    calls: list[tuple[CallTimes, float]] = field(default_factory=list)

    def came(self, now_s: float) -> None:
        """One more was seen waiting."""
        self.sessions += 1
        self.came_s = now_s

    def call(self, times: CallTimes, seen_s: float) -> None:
        """A call is over, and was seen to be."""
        self.calls.append((times, seen_s))

    def told(self, now_s: float) -> str:
        """The account, in milliseconds."""
        sums = {
            "came": self.came_s - self.began_s,
            "first_sent": min(times.sent_s for times, _ in self.calls) - self.began_s,
            "idle": _idle(sorted((times.sent_s, times.over_s) for times, _ in self.calls)),
            "last_over": max(times.over_s for times, _ in self.calls) - self.began_s,
            "all": now_s - self.began_s,
            "plan": self.plan_s,
            "hand": sum(times.begun_s - times.handed_s for times, _ in self.calls),
            "launch": sum(times.sent_s - times.begun_s for times, _ in self.calls),
            "back": sum(seen_s - times.over_s for times, seen_s in self.calls),
            "answer": self.answer_s,
        }
        parts = " ".join(f"{name}_ms={1000 * seconds:.2f}" for name, seconds in sums.items())
        return f"event=restores sessions={self.sessions} calls={len(self.calls)} bytes={self.size_bytes} {parts}"


def _idle(spans: list[tuple[float, float]]) -> float:
    """How long there was none of these spans, in order of their beginnings, between the first and the last."""
    idle, end = 0.0, spans[0][1]
    for start, over in spans:
        idle += max(start - end, 0.0)
        end = max(end, over)
    return idle
