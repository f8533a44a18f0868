"""An engine as the guest of a parked group: its sessions leave by a drain, and it proves itself by a known answer.

Owns the order of that for one worker. Invariants: nothing is locked while a session runs there or still needs what is
there; after its memory has been elsewhere it takes sessions only when it has answered as before, and then as an engine
whose KV nobody holds. How sessions move is the drain's business, and when that is asked for the keeper's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from ...session.errors import ParkError
from ...session.records import SlotState
from ..workers import Worker

LOOK_EVERY_S = 0.05
ASK_S = 30.0
# Short, so that it costs nothing; long enough that a wrong weight or a wrong kernel would show.
PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
TOKENS = 24


class Emptying(Protocol):
    """A drain of one worker: `WorkerDrain`."""

    @property
    def is_over(self) -> bool: ...

    def order(self, reason: str, within_s: float) -> None: ...

    def cancel(self) -> bool: ...

    async def close(self) -> None: ...


class WorkerGuest:
    """`empty` makes the worker's drain; `others`: whether another one is ready; `changed`: it takes sessions, or none.

    `on_lost` is told why the worker is being killed.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        empty: Callable[[], Emptying],
        others: Callable[[], bool],
        changed: Callable[[], None],
        on_lost: Callable[[str], None],
        within_s: float,
    ) -> None:
        self._worker = worker
        self._empty = empty
        self._others = others
        self._changed = changed
        self._on_lost = on_lost
        self._within_s = within_s

    async def quiesce(self) -> None:
        """Its sessions go elsewhere; then it is between two steps, for it has nothing to do."""
        if self._left() and not self._others():
            raise ParkError(
                f"sessions: worker {self._worker.name} has {self._left()} and no other worker is ready to take them; "
                "start one, or wait until they have ended"
            )
        self._take(False)
        drain = self._empty()
        try:
            drain.order("park", self._within_s)
            while not drain.is_over:  # noqa: ASYNC110 - it looks by itself
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await drain.close()
        if self._left():
            raise ParkError(
                f"sessions: {self._left()} could not leave within {self._within_s:g} s; see the log for why"
            )
        while self._is_at_work():  # noqa: ASYNC110 - an arena makes no noise
            await asyncio.sleep(LOOK_EVERY_S)

    async def save(self) -> Mapping[str, Any]:
        """What it answers now. Its sessions are elsewhere already, with their KV; then it sleeps, if it can."""
        known = {"worker": self._worker.name, "answer": await self._answer()}
        # vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1: weights by its own copies, and KV is dropped.
        async with self._asking() as http, http.post("/sleep?level=1") as answer:
            if answer.status not in (200, 404, 405):
                raise ParkError(f"worker {self._worker.name} cannot go to sleep: it answers {answer.status}")
        return known

    async def wake(self) -> None:
        """Its memory was never elsewhere: it takes sessions as before."""
        await self._awake()
        self._take(True)

    async def prove(self, known: Mapping[str, Any]) -> None:
        """The same answer as before, token by token."""
        await self._awake()
        answer = await self._answer()
        wanted = known.get("answer")
        if wanted is None or answer != list(wanted):
            raise ParkError(
                f"worker {self._worker.name} answers otherwise than before it was parked; it is started anew"
            )
        epoch = self._worker.current
        if epoch is not None and epoch.pools:
            # Whether its memory is still the one that others map is not known: nobody brings KV there, or takes any.
            epoch.facts = {**epoch.facts, "pools": []}
        self._take(True)

    def lost(self, text: str) -> None:
        """Nothing was there but the engine."""
        self._on_lost(text)

    def _take(self, takes: bool) -> None:
        self._worker.leaving = not takes
        self._changed()

    def _left(self) -> int:
        epochs = [self._worker.current, *self._worker.older]
        return sum(len(epoch.sessions) for epoch in epochs if epoch is not None)

    def _is_at_work(self) -> bool:
        epoch = self._worker.current
        if epoch is None or epoch.arena is None:
            return False
        return any(slot.state is SlotState.LIVE for slot in epoch.arena.slots())

    async def _awake(self) -> None:
        """Wake it if it sleeps, whoever had it sleep."""
        async with self._asking() as http:
            async with http.get("/is_sleeping") as told:
                if told.status != 200 or (await told.json()).get("is_sleeping") is not True:
                    return
            async with http.post("/wake_up") as answer:
                if answer.status != 200:
                    raise ParkError(f"worker {self._worker.name} does not wake up: it answers {answer.status}")

    async def _answer(self) -> list[Any]:
        async with self._asking() as http:
            async with http.get("/v1/models") as listed:
                model = (await listed.json())["data"][0]["id"]
            body = {
                "model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True,
            }  # fmt: skip
            async with http.post("/v1/completions", json=body) as answer:
                told = await answer.json()
            [choice] = told["choices"]
            # Engines that give no ids are compared by what they say.
            return list(choice.get("token_ids") or [choice["text"]])

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The engine itself, past the proxy. ParkError for whatever it answers that is no answer."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with aiohttp.ClientSession(self._worker.url, timeout=timeout) as http:
                yield http
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise ParkError(
                f"worker {self._worker.name} gives no answer to a short request ({type(error).__name__}: {error})"
            ) from error
