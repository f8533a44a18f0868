"""Streams of one length, all at once, and what their clients saw: the load of every measurement here.

Owns the requests, drawn from a seed: prompts are random token ids, so that no prefix cache knows any of them. Reading
and retrying is the load test's own sender's.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from ...session.errors import EngineError
from ..client import HALF_A_CHARACTER
from ..load.live import Live
from ..load.sender import Route, Sender
from ..load.workload import COMPLETIONS, Ask
from .models import ID_MAX, ID_MIN, SERVED_AS

LOOK_S = 0.005
SILENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams, each of so many prompt and output tokens. Equal seeds make equal prompts."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    seed: str = "1"

    def asks(self) -> list[Ask]:
        """The requests."""
        return [Ask(i, COMPLETIONS, self._body(i), self.output_tokens) for i in range(self.streams)]

    def _body(self, index: int) -> dict[str, Any]:
        chance = Random(f"{self.seed}/{index}")
        return {
            "model": SERVED_AS,
            "prompt": [chance.randrange(ID_MIN, ID_MAX) for _ in range(self.prompt_tokens)],
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def fault_of(live: Live) -> str:
    """What is wrong with an answer that has ended; "" where nothing is, and while it goes on.

    Half a character is nothing: a model of random weights writes bytes that make none, interrupted or not.
    """
    answer = live.answer
    violations = [violation for violation in live.violations if violation != HALF_A_CHARACTER]
    ended_well = answer.done and answer.error is None and bool(answer.finish)
    if live.ended_s is None or (ended_well and not violations):
        return ""
    return f"stream {live.ask.index}: {answer.error or violations} status {answer.status}"


class Streams:
    """Requests under way along one route."""

    def __init__(self, route: Route, *, answer_s: float) -> None:
        self._sender = Sender(route, answer_s=answer_s, silence_s=SILENCE_S)
        self._tasks: list[asyncio.Task[None]] = []
        self.lives: list[Live] = []

    def send(self, ask: Ask) -> Live:
        """Send one; its answer is read meanwhile."""
        live = Live(ask, 0, time.perf_counter())
        self.lives.append(live)
        self._tasks.append(asyncio.create_task(self._sender.send(live)))
        return live

    async def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Wait for something that the streams show. EngineError when they end, or time does, before it."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if all(task.done() for task in self._tasks) or time.monotonic() > deadline_s:
                counts = sorted(len(live.tokens) for live in self.lives)
                raise EngineError(
                    f"{what}: not within {timeout_s:g} s; tokens of the streams: {counts}; {self.wrong()}"
                )
            await asyncio.sleep(LOOK_S)

    def wrong(self) -> str:
        """What is wrong with the first answer that is not whole; "" where all are."""
        return next(filter(None, map(fault_of, self.lives)), "")

    async def finish(self, *, timeout_s: float) -> None:
        """Wait for the ends of all answers. EngineError when one is not whole."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._tasks)
        except TimeoutError:
            raise EngineError(
                f"{sum(not t.done() for t in self._tasks)} streams did not end in {timeout_s:g} s"
            ) from None
        if wrong := self.wrong():
            raise EngineError(f"not every answer is whole: {wrong}")

    async def close(self) -> None:
        """Cancel what is left; engines see their clients go."""
        for task in self._tasks:
            task.cancel()
        with suppress(Exception):
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sender.close()


async def run_all(route: Route, load: Load, *, timeout_s: float) -> Sequence[Live]:
    """Send all at once and read them to their ends."""
    streams = Streams(route, answer_s=timeout_s)
    try:
        for ask in load.asks():
            streams.send(ask)
        await streams.finish(timeout_s=timeout_s + 5)
        return streams.lives
    finally:
        await streams.close()
