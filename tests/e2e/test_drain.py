"""A node drains, and its sessions go on exactly on the other one: real nodes with engines, and a gateway in front."""

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
    "prompt": "What leaves a node, another one has to take", "temperature": 0.8, "seed": 5, "presence_penalty": 0.7,
    "max_tokens": 900,
}  # fmt: skip
CUT = 150


@pytest_asyncio.fixture
async def fleet(command: list[str], tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two nodes that keep what others bring, and bring nothing by themselves."""
    files = make_fleet(tmp_path / "files").files
    ports = dict(zip(("node-0", "node-1"), free_ports(2), strict=True))

    def of_each(name: str) -> dict[str, object]:
        return {
            "fleet.secret_file": str(files.secret), "replicas.tls_cert": str(files.certificate),
            "replicas.tls_key": str(files.key), "replicas.tls_ca": str(files.ca),
            "replicas.listen": f"127.0.0.1:{ports[name]}", "replicas.memory_bytes": 256 << 20,
            "store.dir": str(tmp_path / f"store-{name}"), "supervise.stop_timeout_s": 30,
        }  # fmt: skip

    with fleets(tmp_path, command) as make:
        fleet = make(of_each=of_each)
        assert files.secret is not None
        fleet.secret = files.secret
        await fleet.start()
        yield fleet


async def test_a_draining_nodes_session_goes_on_exactly_elsewhere(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    wanted = await fleet.stream(http, BODY)
    require_whole(wanted)
    ended: list[str] = []

    async def end(answer: Answer) -> None:
        if not ended and len(answer.token_ids) >= CUT:
            ended.append(await fleet.serving(http))
            fleet.end(ended[0])

    answer = await fleet.stream(http, BODY, end, X_Midstream_Policy="exact")
    require_whole(answer)
    assert ended
    told = [s for s in await fleet.sessions(http) if s["outcomes"]]
    assert outcome_of(answer) == ("exact", 1), told
    assert answer.same_as(wanted)
    assert (told[-1]["outcomes"][0]["reason"], told[-1]["outcomes"][0]["tier"]) == ("move", "replica")
    assert told[-1]["node"] != ended[0]
    process = fleet.nodes[ended[0]].process.process
    assert process is not None
    assert await asyncio.to_thread(process.wait, 30) == 0
