"""Which models a node's engines serve, as clients name them: asked of the engines themselves.

Owns what they said last. Invariants: nobody waits for it; each ready engine is asked once when it comes up and then now
and then, for adapters come and go; what no engine told is not known, which is not the same as none.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp
import msgspec

from .bounded_body import bounded_body
from .fleet.record import TEXT_MAX

ASK_EVERY_S = 30.0
_ANSWER_S = 2.0
_ANSWER_BYTES_MAX = 1 << 20
# What a record can hold.
NAMES_MAX = 64
_NAMES_BYTES_MAX = 4 << 10

Ask = Callable[[str], Awaitable[tuple[str, ...]]]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServedModels:
    """Of one node. `engines`: the base URL of each that is ready, by a name for its present start."""

    def __init__(self, engines: Callable[[], Mapping[str, str]], ask: Ask | None = None) -> None:
        self._engines = engines
        self._ask = ask or models_of
        self._told: dict[str, tuple[str, ...]] = {}
        self._asked_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def names(self) -> tuple[str, ...]:
        """Models that every ready engine serves, as far as all have told; () while that is not known."""
        engines, now_s = self._engines(), time.monotonic()
        for gone in self._asked_s.keys() - engines.keys():
            del self._asked_s[gone]
            self._told.pop(gone, None)
        for engine, url in engines.items():
            if engine not in self._asking and now_s - self._asked_s.get(engine, -ASK_EVERY_S) >= ASK_EVERY_S:
                self._asked_s[engine] = now_s
                self._asking[engine] = task = asyncio.create_task(self._find_out(engine, url))
                task.add_done_callback(lambda _, engine=engine: self._asking.pop(engine, None))  # type: ignore[misc]
        told = [self._told.get(engine, ()) for engine in engines]
        return _common(told) if told and all(told) else ()

    async def close(self) -> None:
        """Ask nobody any more."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _find_out(self, engine: str, url: str) -> None:
        names = await self._ask(url)
        if engine in self._asked_s and (names or engine not in self._told):
            self._told[engine] = names


def _common(told: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    everywhere = frozenset(told[0]).intersection(*told[1:])
    return tuple(name for name in told[0] if name in everywhere)


async def models_of(url: str) -> tuple[str, ...]:
    """What an engine's `/v1/models` names; () where it does not tell, or names more than a record can hold."""
    with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as http,
            http.get(url + "/v1/models") as answer,
        ):
            raw = await bounded_body(answer.content, _ANSWER_BYTES_MAX)
            if answer.status == 200:
                names = tuple(dict.fromkeys(model.id for model in msgspec.json.decode(raw, type=_Models).data))
                return names if _fits(names) else ()
    return ()


def _fits(names: Sequence[str]) -> bool:
    if len(names) > NAMES_MAX or not all(name.isprintable() and 0 < len(name) <= TEXT_MAX for name in names):
        return False
    return sum(len(name.encode()) for name in names) <= _NAMES_BYTES_MAX
