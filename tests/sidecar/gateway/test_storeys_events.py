"""Streams without token ids through a gateway: what its client has is known by its text alone."""

import asyncio
from typing import Any

import pytest

from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
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


def undisturbed(path: str) -> str:
    told = messages_events(RICH, "a") if path == MESSAGES else responses_events(RICH, "a", seed_time=1700000097)
    return "".join(texts(b"".join(event.raw for event in told)))


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
