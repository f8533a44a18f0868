"""Answers of vLLM read whole, and the same answers taken up by another engine at a given token.

Owns what a reader of an answer has in the end (`Told`), field by field, so that nothing that an engine sends goes
uncompared, and the move itself: the first engine goes on, the mover copies the session's KV out of its live pool, and
the second engine tells the session from its first token to its end.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from midstream.session.arena import ArenaReader, LoadState, Slot
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume, with_marker
from midstream.sidecar.mover.client import MoverClient

WAIT_S = 90.0
LOAD_S = 10.0
# Made anew for each answer.
OWN_NAMES = frozenset({"id", "created"})


@dataclass(slots=True)
class Told:
    """All that one answer says: texts and lists put together, everything else as it was said last.

    `fields` are the names that its chunks have, wherever they stand; `seams` are the chunks themselves.
    """

    status: int = 200
    values: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    error: Any = None
    report: str = ""

    @property
    def ids(self) -> list[int]:
        """Its output token ids."""
        return list(self.values.get("choices.0.token_ids") or [])

    def text(self, name: str) -> str:
        """A text by the end of its name, "" if there is none."""
        return "".join(v for k, v in self.values.items() if k.endswith(name) and isinstance(v, str))

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Put a chunk, or a whole answer, to what was told before."""
        self.chunks.append(dict(chunk))
        if chunk.get("error") is not None:
            self.error = chunk["error"]
        self._take("", chunk)

    def _take(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in OWN_NAMES:
                    # Deltas of a stream and the message of a whole answer say the same.
                    self._take(f"{name}.{key}" if name else key, inner)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and "index" in item for item in value):
            for item in value:
                self._take(f"{name}.{item['index']}", {k: v for k, v in item.items() if k != "index"})
        elif isinstance(value, list):
            self.fields.add(name)
            self._extend(name, value)
        else:
            self.fields.add(name)
            self._say(name, value)

    def _extend(self, name: str, items: list[Any]) -> None:
        """Lists go on. Logprobs are numbers of their own: they depend a little on who else is in the batch."""
        kept = self.values.setdefault(name, [])
        if not isinstance(kept, list):
            kept = self.values[name] = []
        for item in items:
            kept.append(_without_logprobs(item, self.numbers.setdefault(name, [])))

    def _say(self, name: str, value: Any) -> None:
        known = self.values.get(name)
        if isinstance(value, str) and isinstance(known, str) and name.rsplit(".", 1)[-1] in GROWING:
            self.values[name] = known + value
        elif value is not None or name not in self.values:
            self.values[name] = value


GROWING = frozenset({"content", "text", "reasoning", "reasoning_content", "arguments"})


def _without_logprobs(item: Any, numbers: list[float]) -> Any:
    """A list's item with every fraction taken out of it and noted."""
    if isinstance(item, float):
        numbers.append(item)
        return "number"
    if isinstance(item, dict):
        return {k: _without_logprobs(v, numbers) for k, v in item.items() if k not in OWN_NAMES}
    if isinstance(item, list):
        return [_without_logprobs(v, numbers) for v in item]
    return item


async def tell(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], **headers: str) -> Told:
    """An answer, streamed or not, to its end."""
    told = Told()
    async with http.post(url, json=dict(body), headers=headers) as response:
        told.status = response.status
        if response.content_type != "text/event-stream":
            told.take(json.loads(await response.text()))
            told.done = response.status == 200
            return told
        async for data in _events(response, told):
            if data == b"[DONE]":
                told.done = True
            else:
                assert not told.done, "a chunk after the end"
                told.take(json.loads(data))
    return told


async def _events(response: aiohttp.ClientResponse, told: Told) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b": midstream "):
                told.report = event[2:].decode()
            elif event.startswith(b"data: "):
                yield event[6:]


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine beside a sidecar: where it listens, and its arena."""

    name: str
    url: str
    arena: Path

    def slot(self, session: SessionId, generation: int) -> tuple[Slot | None, list[int]]:
        """What its arena says of a session: record and journal."""
        with closing(ArenaReader(self.arena)) as reader:
            slot = reader.find(session, generation)
            return slot, [] if slot is None else reader.journal(slot)


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of a move: the first engine's own answer, the second's, and what the second says of its KV."""

    stayed: Told
    told: Told
    load: LoadState
    loaded: int
    recomputed: int
    positions: int
    reason: str

    @property
    def exact(self) -> bool:
        """Whether all KV but that of the newest token was brought."""
        return (self.load, self.loaded, self.recomputed) == (LoadState.DONE, self.positions, 1)


async def move(
    http: aiohttp.ClientSession,
    mover: MoverClient,
    engines: tuple[Engine, Engine],
    path: str,
    body: Mapping[str, Any],
    cut: int,
    **changes: Any,
) -> Moved:
    """Run a request on the first engine, and take it up on the second after `cut` outputs.

    `changes` are made to the request on its way to the second engine.
    """
    first, second = engines
    session = SessionId(secrets.token_hex(16))
    staying = asyncio.create_task(tell(http, first.url + path, with_marker(dict(body), Marker(session, 1))))
    slot, journal = await _journaled(first, session, cut, staying)
    resume = Resume(tuple(journal[:cut]), KvSource.HELD, slot.prompt_hash)
    going = asyncio.create_task(
        tell(http, second.url + path, with_marker({**body, **changes}, Marker(session, 2, resume)))
    )
    restored = await mover.restore(
        session, source=(first.arena, 1), to_arena=second.arena, to_generation=2, deadline_s=LOAD_S
    )
    told, stayed = await going, await staying
    after, _ = second.slot(session, 2)
    load, loaded, again = (after.load, after.loaded, after.recomputed) if after else (LoadState.NONE, 0, 0)
    return Moved(stayed, told, load, loaded, again, slot.prompt_len + cut - 1, f"{restored.reason} {restored.error}")


async def _journaled(
    engine: Engine, session: SessionId, cut: int, staying: "asyncio.Task[Told]"
) -> tuple[Slot, list[int]]:
    """Wait until a session has so many outputs. Shared memory makes no noise, so this has to look."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        slot, journal = engine.slot(session, 1)
        if slot is not None and len(journal) >= cut:
            return slot, journal
        assert not staying.done(), f"the answer ended before token {cut}: {staying.result()}"
        assert time.monotonic() < deadline_s, f"no token {cut} within {WAIT_S:g} s"
        await asyncio.sleep(0.005)
