"""A node is lost with all it had: its sessions go on exactly, from what it had brought to the other one's memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.client import Answer
from midstream.session.ports import free_ports
from support.gateways import Fleet, fleets
from support.peers import make_fleet
from support.sidecars import outcome_of, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

BODY: dict[str, Any] = {
    "prompt": "What a node knows, another one has to know", "temperature": 0.8, "seed": 3, "presence_penalty": 0.7,
    "max_tokens": 600,
}  # fmt: skip
CUT = 150


@pytest_asyncio.fixture
async def fleet(command: list[str], tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two nodes, each of which keeps what the other one brings."""
    made = make_fleet(tmp_path / "files")
    ports = dict(zip(("node-0", "node-1"), free_ports(2), strict=True))

    def of_each(name: str) -> dict[str, object]:
        [other] = set(ports) - {name}
        return {
            **made.settings,
            "replicas.listen": f"127.0.0.1:{ports[name]}", "replicas.memory_bytes": 256 << 20,
            "replicas.to": f"peer://127.0.0.1:{ports[other]}",
            "store.dir": str(tmp_path / f"store-{name}"),
            "store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8,
        }  # fmt: skip

    with fleets(tmp_path, command) as make:
        fleet = make(of_each=of_each)
        assert made.files.secret is not None
        fleet.secret = made.files.secret
        await fleet.start()
        yield fleet


async def test_a_lost_nodes_session_goes_on_exactly_from_the_other_nodes_memory(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    wanted = await fleet.stream(http, BODY)
    require_whole(wanted)
    lost: list[str] = []

    async def lose(answer: Answer) -> None:
        if not lost and len(answer.token_ids) >= CUT:
            lost.append(await fleet.serving(http))
            await asyncio.to_thread(fleet.lose, lost[0])

    answer = await fleet.stream(http, BODY, lose, X_Midstream_Policy="exact")
    require_whole(answer)
    assert lost
    told = [s for s in await fleet.sessions(http) if s["outcomes"]]
    assert outcome_of(answer) == ("exact", 1), told
    assert answer.same_as(wanted)
    assert told[-1]["outcomes"][0]["tier"] == "replica"
    assert told[-1]["node"] != lost[0]
