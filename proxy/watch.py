"""Watches one attempt while its stream is read: the coordinator's news, and silence.

Owns the one timer of a stream. Invariant: it ends an attempt by closing the worker's connection, so that reading
stops at once and the engine gives up the request; `reason` then says why. Only a planned move leaves the connection
as it is: reading stops, and the engine goes on. It judges silence by `stall` alone.
"""

import asyncio
from collections.abc import Callable

import aiohttp

from .coordinator import Reason
from .stall import Rhythm, StallPolicy
from .upstream import UpstreamLost

_GRACE_S = 0.1


class Watch:
    """Use as a context manager around the reading of one answer.

    `journaled` tells how many tokens the engine has written so far, where its stream does not: parsers may hold all of
    a thought or a tool call back. As long as that grows, silence is no stall.
    """

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        interrupted: "asyncio.Future[Reason]",
        policy: StallPolicy,
        journaled: Callable[[], int] | None = None,
    ) -> None:
        self.reason: Reason | None = None
        self._answer = answer
        self._interrupted = interrupted
        self._rhythm = Rhythm(policy)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Set while the proxy waits for the client: silence is not the engine's then.
        self.sending = False
        self._overdue = False
        self._is_patient = False
        self._journaled = journaled
        self._journal_len = 0

    def __enter__(self) -> "Watch":
        self._interrupted.add_done_callback(self._on_interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        self._interrupted.remove_done_callback(self._on_interrupted)
        if self._timer is not None:
            self._timer.cancel()

    def token(self) -> None:
        """Tokens arrived."""
        self._overdue = False
        self._rhythm.token(self._loop.time())
        if self._timer is None:
            self._look()
        elif self._is_patient:
            # It was set for the wait after a replay, which is far longer than any between tokens.
            self._timer.cancel()
            self._is_patient = False
            self._look()

    def replayed(self) -> None:
        """Tokens arrived that an earlier worker had made."""
        self._overdue = False
        self._rhythm.replayed(self._loop.time())
        if self._timer is None:
            self._is_patient = True
            self._look()

    def _look(self) -> None:
        # The timer is not moved at each token: it looks again when the silence could have become too long.
        self._timer = None
        now_s = self._loop.time()
        if self.sending or self._writes_on():
            self._rhythm.resume(now_s)
        remaining_s = self._rhythm.remaining_s(now_s)
        if remaining_s is None:
            return
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._look)
        elif self._overdue:
            self._trip(Reason.STALL)
        else:
            # The proxy may have begun to listen only now, after a long wait for its client: what the engine has sent
            # meanwhile is read within the grace.
            self._overdue = True
            self._timer = self._loop.call_later(_GRACE_S, self._look)

    def _writes_on(self) -> bool:
        """Whether the engine has journaled more since it was last asked."""
        if self._journaled is None:
            return False
        before, self._journal_len = self._journal_len, self._journaled()
        return self._journal_len > before

    def _on_interrupted(self, news: "asyncio.Future[Reason]") -> None:
        if not news.cancelled():
            self._trip(news.result())

    def _trip(self, reason: Reason) -> None:
        if self.reason is None:
            self.reason = reason
            if reason is Reason.MOVE:
                self._answer.content.set_exception(UpstreamLost(reason, "the session is moved"))
            else:
                self._answer.close()
