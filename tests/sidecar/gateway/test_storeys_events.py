"""Streams without token ids through a gateway: what its client has is known by its text alone."""

import asyncio
import json
from typing import Any

import pytest

from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from support.event_answers import RICH, messages_events, responses_events
from support.proxying import Got
from support.scripted import Fate, Script
from support.scripted_events import MESSAGES, RESPONSES, EventEngine
from support.storeys import Node, storeys

ASKED: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "tiny", "input": "x", "temperature": 0, "stream": True},
    MESSAGES: {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50, "temperature": 0,
        "stream": True,
    },
}  # fmt: skip
both = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
STALLS = Script(at=5, fate=Fate.STALLS)


def texts(raw: bytes) -> list[str]:
    """All pieces of text of a stream, one after the other, whatever they are named by."""
    found = []
    for line in raw.split(b"\n"):
        for key in (b"delta", b"text", b"thinking", b"partial_json"):
            name = b'"' + key + b'":"'
            if b"delta" in line and name in line:
                found.append(line.split(name, 1)[1].split(b'"')[0].decode())
                break
    return found


def said(raw: bytes) -> str:
    """The same of what may come in larger pieces than it was written in."""
    found = ""
    for line in raw.split(b"\n"):
        event = json.loads(line[5:]) if line.startswith(b"data:") and b"delta" in line else {}
        delta = event.get("delta", "")
        pieces = [delta] if isinstance(delta, str) else [delta.get(k, "") for k in ("text", "thinking", "partial_json")]
        found += "".join(pieces)
    return found


def undisturbed_raw(path: str) -> bytes:
    told = messages_events(RICH, "a") if path == MESSAGES else responses_events(RICH, "a", seed_time=1700000097)
    return b"".join(event.raw for event in told)


def undisturbed(path: str) -> str:
    return "".join(texts(undisturbed_raw(path)))


def trailer(got: Got) -> str:
    return next(p.decode() for p in got.raw.split(b"\n\n") if p.startswith(b": midstream")).partition(" gap_ms")[0]


@both
async def test_a_lost_node_costs_such_a_stream_a_pause_and_is_never_called_exact(path: str) -> None:
    a, b = (Node(name, EventEngine(RICH, STALLS, name=name)) for name in "ab")
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(fleet.client.post(path, ASKED[path], X_Midstream_Report="1"))
        await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in (a, b)))
        lost = fleet.nodes[fleet.serving[0]]
        other = b if lost is a else a
        other.coordinator.engines[0].scripts = [Script()]
        await lost.lose()
        got = await asking
        assert got.status == 200
        assert "".join(texts(got.raw)) == undisturbed(path) != ""
        assert trailer(got) == ": midstream outcome=recomputed takeovers=1"
        # The next node is told that its client has something, though nobody knows which tokens that is.
        [(_, facts, outputs, unseen)] = other.coordinator.of("take_in")
        assert (outputs, unseen, facts.path) == ((), True, path)
        assert other.coordinator.engines[0].seen[0].body["kv_transfer_params"]["midstream"]["generation"] == 4097


@both
async def test_a_planned_move_takes_such_a_stream_along_exactly_for_its_node_knows_the_tokens(path: str) -> None:
    a, b = (Node(name, EventEngine(RICH, Script(gap_s=0.05), name=name)) for name in "ab")
    a.coordinator.first_kv = b.coordinator.first_kv = KvSource.DISK
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post(path, ASKED[path], X_Midstream_Report="1", X_Midstream_Policy="exact")
        )
        await fleet.until(lambda: any(len(j) >= 3 for n in (a, b) for j in n.coordinator.engines[0].journals.values()))
        source = fleet.nodes[fleet.serving[0]]
        other = b if source is a else a
        source.coordinator.draining = True
        got = await asking
        assert got.status == 200
        assert said(got.raw) == said(undisturbed_raw(path)) != ""
        assert trailer(got) == ": midstream outcome=exact takeovers=1"
        [(_, _, outputs, unseen)] = other.coordinator.of("take_in")
        assert not unseen
        assert outputs == other.coordinator.engines[0].answer.ids[: len(outputs)]
        assert len(outputs) >= 3


@both
async def test_a_planned_move_that_fails_brings_such_a_stream_back_as_exactly(path: str) -> None:
    a, b = (Node(name, EventEngine(RICH, Script(gap_s=0.05), name=name)) for name in "ab")
    a.coordinator.first_kv = b.coordinator.first_kv = KvSource.DISK
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post(path, ASKED[path], X_Midstream_Report="1", X_Midstream_Policy="exact")
        )
        await fleet.until(lambda: any(len(j) >= 3 for n in (a, b) for j in n.coordinator.engines[0].journals.values()))
        source = fleet.nodes[fleet.serving[0]]
        other = b if source is a else a
        other.coordinator.refusal = Refused("draining", "it drains, too", retry_after_s=1)
        source.coordinator.draining = True
        await fleet.until(lambda: bool(source.coordinator.of("take_in")))
        source.coordinator.draining = False
        got = await asking
        assert said(got.raw) == said(undisturbed_raw(path)) != ""
        assert trailer(got) == ": midstream outcome=exact takeovers=1"


@both
async def test_one_that_demands_exactness_ends_in_an_error_where_its_node_is_lost(path: str) -> None:
    a, b = (Node(name, EventEngine(RICH, STALLS, name=name)) for name in "ab")
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(fleet.client.post(path, ASKED[path], X_Midstream_Policy="exact"))
        await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in (a, b)))
        lost = fleet.nodes[fleet.serving[0]]
        await lost.lose()
        got = await asking
        assert b"not_exact" in got.raw
        assert undisturbed(path).startswith("".join(texts(got.raw)))
        assert texts(got.raw)
        assert [n.coordinator.engines[0].seen for n in (a, b) if n is not lost] == [[]]


async def test_what_a_parser_on_a_node_holds_back_is_no_stall_to_the_gateway() -> None:
    engine = EventEngine(RICH, Script(gap_s=0.05), name="a")
    engine.mute_from = 3
    patience = ProxySettings(stall=StallPolicy(floor_s=0.02, factor=1, ceiling_s=5))
    async with storeys(Node("a", engine), settings=patience) as fleet:
        got = await fleet.client.post(RESPONSES, ASKED[RESPONSES], X_Midstream_Report="1")
        assert "".join(texts(got.raw)) == undisturbed(RESPONSES)
        assert trailer(got) == ": midstream outcome=undisturbed takeovers=0"
