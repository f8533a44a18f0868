"""An event loop in virtual time whose callbacks belong to processes that can be stopped, woken and killed.

Owns the order of everything that happens. Invariants: two things that are due at the same time happen in the order in
which they were asked for, so one seed is one story; nothing of a stopped process runs until it is woken, and then all
that it missed runs in order, as after SIGSTOP; a killed process unwinds, and what it does meanwhile reaches nobody
(whoever it would reach asks `is_alive`). It has no sockets, threads or signals.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

_PROCESS: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("process", default=None)
# What the world does, and no process: deliveries, deaths, checks.
WORLD = contextvars.Context()
_CANCELLED_MAX = 1000
_AT_ONCE_MAX = 1_000_000
# Code takes time, too: whoever waits for less than a clock can tell would wait for ever.
_TURN_S = 1e-7


class Deadlock(AssertionError):
    """Every task waits, and nothing is left that could wake one."""


class Spinning(AssertionError):
    """Things happen without end, and no time passes."""


class SimLoop(asyncio.BaseEventLoop):
    """Jumps from one due time to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.steps = 0
        self.at_once_max = _AT_ONCE_MAX
        # At which step time last went on.
        self._since = 0
        self._ready: deque[asyncio.Handle]
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = count()
        self._cancelled = 0
        self.set_task_factory(_made)

    def time(self) -> float:
        """Seconds, of which next to none passes while anything is ready to run."""
        return self.now_s

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As in any loop; of equal times the one that was asked for first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._due, (when, next(self._order), timer))
        timer._scheduled = True
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As in any loop."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1

    def _run_once(self) -> None:
        ready, due = self._ready, self._due
        if self._cancelled > _CANCELLED_MAX and self._cancelled > len(due) // 2:
            self._due = due = [entry for entry in due if not entry[2]._cancelled]
            heapq.heapify(due)
            self._cancelled = 0
        if not ready:
            while due and due[0][2]._cancelled:
                heapq.heappop(due)
                self._cancelled -= 1
            if due:
                if due[0][0] > self.now_s:
                    self.now_s, self._since = due[0][0], self.steps
            elif not self._stopping:
                raise Deadlock(f"at {self.now_s:.3f} s nothing can happen any more")
        while due and due[0][0] <= self.now_s:
            timer = heapq.heappop(due)[2]
            timer._scheduled = False
            ready.append(timer)
        if self.steps - self._since > self.at_once_max:
            raise Spinning(f"at {self.now_s:.3f} s without end: {[str(handle) for handle in ready][:4]}")
        self.now_s += _TURN_S
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is not None and process.is_stopped:
                process.parked.append(handle)
                continue
            self.steps += 1
            handle._run()

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: list[Any]) -> None:
        pass


class Process:
    """One process: all tasks and timers that began in it."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.parked: deque[asyncio.Handle] = deque()
        # In the order in which they began, so that they end in one order, too.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop

    def start(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> "asyncio.Task[Any]":
        """Run this in the process, whoever asks."""
        return self._loop.create_task(work, name=name, context=self.context.copy())

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def wake(self) -> None:
        """SIGCONT: what was due meanwhile happens now, in order."""
        self.is_stopped = False
        self._loop._ready.extend(self.parked)
        self.parked.clear()

    def kill(self) -> None:
        """SIGKILL: from now on nothing that it does reaches anybody."""
        self.is_alive = False
        self.wake()
        for task in list(self.tasks):
            task.cancel()


def current() -> Process | None:
    """The process whose code runs now; None in the world itself."""
    return _PROCESS.get()


def _made(loop: asyncio.AbstractEventLoop, coro: Any, **how: Any) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **how)
    context = how.get("context")
    process = _PROCESS.get() if context is None else context.get(_PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda task: process.tasks.pop(task, None))
        if not process.is_alive:
            # Of a killed process nothing begins any more.
            task.cancel()
    return task
