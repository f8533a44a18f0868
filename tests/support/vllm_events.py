"""Real streams of the Responses and Messages APIs, read event by event, and interrupted: by a planned move or a kill.

Owns the reading of such a stream and what of two streams must be the same: everything but the names that engines draw,
which must be consistent in each, and the places where text is cut into deltas.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient

from .event_answers import joined
from .vllm_rig import ASK_REPORT, Rig, before_its_end

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SESSION = "X-Midstream-Session"
# Names that an engine draws, by the member in which they stand.
_DRAWN = frozenset({"id", "item_id", "call_id", "signature"})
# What an engine had in its cache is its own affair.
_ITS_OWN = frozenset({"cached_tokens", "cache_write_tokens", "created_at", "created"})


@dataclass(frozen=True, slots=True)
class EventCase:
    """One request, and after how many tokens it is to be interrupted."""

    path: str
    body: Mapping[str, Any]
    cuts: tuple[int, ...] = ()


@dataclass(slots=True)
class Heard:
    """What a client got."""

    status: int = 200
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)
    report: str = ""

    @property
    def text_count(self) -> int:
        """How many deltas of text there were."""
        return sum(1 for event in self.events if "delta" in str(event.get("type")) or event.get("choices"))

    def require_in_order(self) -> None:
        """Every number in its place, and one ending."""
        numbers = [event["sequence_number"] for event in self.events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))
        kinds = [event.get("type") for event in self.events]
        for once in ("response.created", "response.completed", "message_start", "message_delta", "message_stop"):
            assert kinds.count(once) <= 1, (once, kinds)
        assert "error" not in kinds, self.events[-1]

    def told(self) -> list[dict[str, Any]]:
        """What two equal answers have in common."""
        names: dict[tuple[str, str], str] = {}
        events = self.events or [self.whole]
        if self.events and "choices" in self.events[0]:
            return [_chat(self.events)]
        return joined([_nameless(event, names) for event in events])


def _nameless(value: Any, names: dict[tuple[str, str], str], key: str = "") -> Any:
    """A value whose drawn names are replaced by the order in which they came up."""
    if isinstance(value, dict):
        return {k: _nameless(v, names, k) for k, v in value.items() if k not in _ITS_OWN}
    if isinstance(value, list):
        return [_nameless(item, names) for item in value]
    if key in _DRAWN and isinstance(value, str):
        kind = "id" if key == "item_id" else key
        return names.setdefault((kind, value), f"{kind} {len(names)}")
    return value


def _chat(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A chat's chunks put together."""
    told: dict[str, Any] = {"ids": len({chunk["id"] for chunk in chunks}), "finish": [], "usage": []}
    for chunk in chunks:
        told["usage"] += [chunk["usage"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            told["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
            delta = choice["delta"]
            for name in ("role", "content", "reasoning"):
                told[name] = told.get(name, "") + (delta.get(name) or "")
            for call in delta.get("tool_calls") or ():
                for name in ("name", "arguments"):
                    key = f"{call['index']} {name}"
                    told[key] = told.get(key, "") + (call["function"].get(name) or "")
    return told


async def hear(
    http: aiohttp.ClientSession,
    url: str,
    case: EventCase,
    *,
    begun: Callable[[Heard], Any] = lambda heard: None,
    on_text: Callable[[Heard], Any] = lambda heard: None,
) -> Heard:
    """An answer to its end. `begun` is told when it has a session, `on_text` of each delta."""
    heard = Heard()
    body = {"model": "smollm2", "temperature": 0, **case.body}
    async with http.post(url + case.path, json=body, headers=ASK_REPORT) as response:
        heard.status = response.status
        heard.session = response.headers.get(SESSION, "")
        if response.content_type != "text/event-stream":
            heard.whole = json.loads(await response.text())
            heard.report = f"outcome={response.headers.get('X-Midstream-Outcome')}"
            return heard
        begun(heard)
        rest = b""
        async for piece in response.content.iter_any():
            *parts, rest = (rest + piece).split(b"\n\n")
            for part in parts:
                _take(heard, part)
            if parts:
                on_text(heard)
        assert not rest
    return heard


def _take(heard: Heard, part: bytes) -> None:
    if part.startswith(b": midstream "):
        heard.report = part[2:].decode()
        return
    for line in part.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            heard.events.append(json.loads(line[6:]))


async def moved(rig: Rig, http: aiohttp.ClientSession, case: EventCase, cut: int) -> Heard:
    """An answer whose session is moved to the other worker when `cut` tokens are journaled."""
    return await before_its_end(lambda: _moved(rig, http, case, cut))


async def _moved(rig: Rig, http: aiohttp.ClientSession, case: EventCase, cut: int) -> Heard:
    moves: list[asyncio.Task[int]] = []

    async with ControlClient(rig.sidecar.state_dir) as control:

        def begun(heard: Heard) -> None:
            moves.append(asyncio.create_task(control.move(SessionId(heard.session), at=cut)))

        heard = await hear(http, rig.sidecar.url, case, begun=begun)
        assert moves, heard
        assert await moves[0] >= cut
    if "outcome=undisturbed" in heard.report:
        raise Refused("ended", f"the end of the answer overtook its move at {cut}")
    return heard


async def killed(rig: Rig, http: aiohttp.ClientSession, cases: Sequence[EventCase], deltas: int) -> list[Heard]:
    """All cases at once on one worker, which is killed when the first has so many deltas."""
    await rig.ready(http)
    killing: list[asyncio.Task[list[str]]] = []

    async def kill() -> list[str]:
        worker = await rig.sidecar.serving(http)
        return kill_worker(worker["pid"], Victim.TREE)

    def look(heard: Heard) -> None:
        if not killing and heard.text_count >= deltas:
            killing.append(asyncio.create_task(kill()))

    running: list[asyncio.Task[Heard]] = []
    async with rig._others_busy(http) as admitted:
        for index, case in enumerate(cases):
            watch = {"on_text": look} if index == len(cases) - 1 else {}
            running.append(asyncio.create_task(hear(http, rig.sidecar.url, case, **watch)))
            await admitted()
    heard = list(await asyncio.gather(*running))
    assert killing
    assert killing[0].result()
    return heard
