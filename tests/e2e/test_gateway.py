"""A gateway in front of real nodes: a node that is lost costs its clients a pause."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.client import Answer
from support.gateways import Fleet, fleets
from support.sidecars import outcome_of, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

GREEDY: dict[str, Any] = {"prompt": "A node is only a node", "temperature": 0, "max_tokens": 400}


@pytest_asyncio.fixture
async def fleet(command: list[str], tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two nodes with a worker each, and a gateway."""
    with fleets(tmp_path, command) as make:
        fleet = make()
        await fleet.start()
        yield fleet


async def test_a_node_that_is_lost_costs_its_stream_a_pause(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    wanted = await fleet.stream(http, GREEDY)
    require_whole(wanted)
    assert outcome_of(wanted) == ("undisturbed", 0)
    lost: list[str] = []

    async def lose(answer: Answer) -> None:
        if not lost and len(answer.token_ids) >= 20:
            lost.append(await fleet.serving(http))
            await asyncio.to_thread(fleet.lose, lost[0])

    answer = await fleet.stream(http, GREEDY, lose)
    require_whole(answer)
    assert lost
    assert outcome_of(answer) == ("recomputed", 1)
    assert len(answer.token_ids) == GREEDY["max_tokens"]
    # What the client had when the node was lost is the undisturbed run's, and nothing of it is said twice.
    assert answer.token_ids[:20] == wanted.token_ids[:20]
    [told] = [s for s in await fleet.sessions(http) if s["outcomes"]]
    assert told["node"] != lost[0]
    assert told["outcomes"][0]["outcome"] == "recomputed"
    async with http.get(f"{fleet.url}/readyz") as ready:
        assert ready.status == 200
