"""An event loop whose clock jumps: nothing is waited for, and what would wait for ever is an error."""

import asyncio
import selectors


class Deadlock(AssertionError):
    """Every task waits, and nothing is left that could wake one."""


class _Jumping(selectors.SelectSelector):
    """Answers at once; the time that should have been waited is added to the loop's clock."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.loop.time():.3f} s nothing can happen any more")
        if timeout > 0:
            self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Without sockets, threads or signals: only tasks and timers."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s
