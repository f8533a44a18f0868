"""Sends requests when they are due (open loop), or so many at once (closed loop), and goes on while faults are to come.

Owns the pace. Open loop: an arrival never waits for an answer; where it is late, the generator is, and that is measured
(`planned_s` beside `sent_s`). Invariant: what was sent is awaited, or cancelled when the run's limit is over.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

from .arrivals import Arrival
from .live import Live
from .workload import Ask

# An arrival may be far off, and the pass over before.
LOOK_EVERY_S = 0.5
AFTER_FAILURE_S = 0.2

Send = Callable[[Live], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a pass lasts: `requests` or `duration_s` at least, `limit_s` at most; `streams_max` are open at once."""

    requests: int | None
    duration_s: float | None
    limit_s: float
    streams_max: int

    def is_over(self, sent: int, passed_s: float) -> bool:
        """Whether as much was sent as was wanted."""
        if self.duration_s is not None:
            return passed_s >= self.duration_s
        return sent >= (self.requests or 0)


class Driver:
    """One pass of load; `lives` holds every request that was sent, in order."""

    def __init__(self, asks: Sequence[Ask], pace: Pace, send: Send, *, go_on: Callable[[], bool]) -> None:
        self._asks = asks
        self._pace = pace
        self._send = send
        self._go_on = go_on
        self.lives: list[Live] = []
        self.began_s = 0.0

    def running(self) -> list[Live]:
        """Requests whose answer is not over."""
        return [live for live in self.lives if live.sent_s and live.ended_s is None]

    async def run(self, arrivals: Iterator[Arrival] | None) -> None:
        """Send and await all; `arrivals` None is the closed loop."""
        self.began_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(self._pace.limit_s):
                if arrivals is None:
                    tasks |= {asyncio.create_task(self._one_after_another()) for _ in range(self._pace.streams_max)}
                else:
                    await self._as_they_come(arrivals, tasks)
                if tasks:
                    await asyncio.gather(*tasks)
        except TimeoutError:
            for live in self.running():
                live.answer.violations.append(f"the pass was over after {self._pace.limit_s:g} s, the answer was not")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_over(self) -> bool:
        return self._pace.is_over(len(self.lives), time.perf_counter() - self.began_s) and not self._go_on()

    def _next(self, planned_s: float) -> Live:
        turn, index = divmod(len(self.lives), len(self._asks))
        live = Live(self._asks[index], turn, planned_s)
        self.lives.append(live)
        return live

    async def _one_after_another(self) -> None:
        while not self._is_over():
            live = self._next(time.perf_counter())
            await self._send(live)
            if not live.answer.whole:
                # Where all requests fail at once, the next round of them is not to be all that the machine does.
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _until(self, due_s: float) -> bool:
        """Wait for a moment; False when the pass was over before it."""
        while not self._is_over():
            left_s = due_s - time.perf_counter()
            if left_s <= 0:
                return True
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        return False

    async def _as_they_come(self, arrivals: Iterator[Arrival], tasks: "set[asyncio.Task[None]]") -> None:
        room = asyncio.Semaphore(self._pace.streams_max)
        for arrival in arrivals:
            due_s = self.began_s + arrival.at_s
            if not await self._until(due_s):
                return
            live = self._next(due_s)
            # Above the bound an arrival has to wait: its lateness says so.
            await room.acquire()
            task = asyncio.create_task(self._send(live))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: room.release())
