"""Follows all sources of notices, and orders drains by what they announce.

Owns what was ordered for the sake of whom. Invariants: a source that fails is asked again after pauses that grow, and
never takes an order back: only its own word does; a notice is an order once, so a drain that somebody cancels is not
ordered again by the same notice; one that is for a time far ahead waits until `lead_s` before that. Nothing that a
source does ends the sidecar.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from ...session.errors import MidstreamError
from ..fleet.backoff import Backoff
from .contract import Notice, Source

_LOG = logging.getLogger("midstream.notices")

RETRY_FIRST_S, RETRY_LARGEST_S = 1.0, 60.0


class Watching:
    """`order` and `withdraw` take a reason."""

    def __init__(
        self,
        sources: Sequence[Source],
        order: Callable[[str], None],
        withdraw: Callable[[str], None],
        *,
        lead_s: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sources = list(sources)
        self._order = order
        self._withdraw = withdraw
        self._lead_s = lead_s
        self._draw = draw
        self._ordered: dict[str, str] = {}
        # What each source said last, and whether it answers: for people.
        self.answers: dict[str, bool] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._follow(source), name=f"notices of {source.name}")

    async def _follow(self, source: Source) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_LARGEST_S, self._draw)

        def tell(notice: Notice | None) -> None:
            backoff.succeeded()
            self.answers[source.name] = True
            self._heard(source.name, notice)

        while True:
            try:
                await source.follow(tell)
            except MidstreamError as error:
                if self.answers.get(source.name, True):
                    _LOG.error("event=notices_silent source=%s error=%s", source.name, error)
                self.answers[source.name] = False
            except Exception:
                self.answers[source.name] = False
                _LOG.exception("event=notices_broke source=%s", source.name)
            await asyncio.sleep(backoff.wait_s())

    def _heard(self, source: str, notice: Notice | None) -> None:
        reason = f"notice:{source}"
        if notice is None:
            if self._ordered.pop(source, None) is not None:
                _LOG.info("event=notice_over source=%s", source)
                self._withdraw(reason)
            return
        if self._ordered.get(source) == notice.text or (notice.in_s is not None and notice.in_s > self._lead_s):
            return
        _LOG.warning("event=notice source=%s text=%s in_s=%s", source, notice.text,
                     "-" if notice.in_s is None else f"{notice.in_s:.0f}")  # fmt: skip
        self._ordered[source] = notice.text
        self._order(reason)
