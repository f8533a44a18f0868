"""Answers of an OpenAI server, read whole and kept field by field: nothing that an engine sends goes uncompared.

Owns what a reader of an answer has in the end (`Told`): texts and lists put together over all chunks, everything else
as it was said last, and the names of all fields that there were. Shares no code with the proxy.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# Made anew for each answer.
OWN_NAMES = frozenset({"id", "created"})
# Texts of which each chunk brings a piece.
GROWING = frozenset({"content", "text", "reasoning", "reasoning_content", "arguments"})


@dataclass(slots=True)
class Told:
    """All that one answer says. `numbers` are its fractions (logprobs), in order, by the list that they stand in."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
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

    @property
    def prompt_ids(self) -> list[int]:
        """Its prompt's token ids; of chats some engines tell them in the choice, others beside it."""
        return list(self.values.get("prompt_token_ids") or self.values.get("choices.0.prompt_token_ids") or [])

    @property
    def usage(self) -> dict[str, Any] | None:
        """Its counts, by name; None if it tells none."""
        counts = {k.removeprefix("usage."): v for k, v in self.values.items() if k.startswith("usage.")}
        return counts or None

    def text(self, name: str) -> str:
        """All texts whose name ends so, put together."""
        return "".join(v for k, v in self.values.items() if k.endswith(name) and isinstance(v, str))

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk, or a whole answer."""
        self.chunks.append(dict(chunk))
        if chunk.get("error") is not None:
            self.error = chunk["error"]
        self._take("", chunk)

    def _take(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in OWN_NAMES:
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
        kept = self.values.get(name)
        if not isinstance(kept, list):
            kept = self.values[name] = []
        kept += [_without_fractions(item, self.numbers.setdefault(name, [])) for item in items]

    def _say(self, name: str, value: Any) -> None:
        known = self.values.get(name)
        if isinstance(value, str) and isinstance(known, str) and name.rsplit(".", 1)[-1] in GROWING:
            self.values[name] = known + value
        elif value is not None or name not in self.values:
            self.values[name] = value


def _without_fractions(item: Any, fractions: list[float]) -> Any:
    """A list's item with every fraction taken out of it and noted: they depend a little on who else is in the batch."""
    if isinstance(item, float):
        fractions.append(item)
        return "fraction"
    if isinstance(item, dict):
        return {k: _without_fractions(v, fractions) for k, v in item.items() if k not in OWN_NAMES}
    if isinstance(item, list):
        return [_without_fractions(v, fractions) for v in item]
    return item


async def tell(
    http: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    on_headers: Callable[[Mapping[str, str]], None] | None = None,
    **headers: str,
) -> Told:
    """An answer, streamed or not, to its end; `on_headers` is called when its head is there."""
    told = Told()
    async with http.post(url, json=dict(body), headers=headers) as response:
        told.status, told.headers = response.status, response.headers
        if on_headers is not None:
            on_headers(response.headers)
        if response.content_type != "text/event-stream":
            told.take(json.loads(await response.text()))
            told.done = response.status == 200
            return told
        async for data in _events(response, told):
            assert not told.done, f"after the end of the stream: {data[:200]!r}"
            if data == b"[DONE]":
                told.done = True
            else:
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
    assert not rest.strip(), f"the stream ends in the midst of an event: {rest[:200]!r}"


def differences(wanted: Told, got: Told, *, within: float) -> list[str]:
    """In words, whatever a reader could tell two answers apart by; fractions are equal `within` so much."""
    found = [
        f"{name}: {wanted.values.get(name)!r:.300} became {got.values.get(name)!r:.300}"
        for name in sorted(wanted.values.keys() | got.values.keys())
        if wanted.values.get(name) != got.values.get(name)
    ]
    if wanted.fields != got.fields:
        found.append(f"fields {sorted(wanted.fields ^ got.fields)} are in one of them only")
    for name in sorted(wanted.numbers.keys() | got.numbers.keys()):
        one, other = wanted.numbers.get(name, []), got.numbers.get(name, [])
        apart = max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)
        if len(one) != len(other) or apart > within:
            found.append(f"{name}: {len(one)} and {len(other)} fractions, up to {apart:g} apart")
    return found
