"""A gateway in front of real nodes with real engines: what becomes of clients when nodes are lost, hang and end.

One fleet serves all tests; what a test has lost is started again before the next one.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.client import Answer
from support.gateways import Fleet, fleets
from support.sidecars import COMPLETIONS, MODEL, outcome_of, require_whole, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

GREEDY: dict[str, Any] = {"prompt": "A node is only a node", "temperature": 0, "max_tokens": 250}
LOST_AFTER_S = 2.0
SETTINGS = {"gateway.poll_s": 0.5, "gateway.lost_after_s": LOST_AFTER_S, "restore.takeover_timeout_s": 30}


@pytest.fixture(scope="module")
def kept_fleet(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three nodes with a worker each, and a gateway."""
    with fleets(tmp_path_factory.mktemp("fleet"), command) as make:
        fleet = make(nodes=3)
        fleet.gateway_settings = SETTINGS
        asyncio.run(fleet.start())
        yield fleet


@pytest_asyncio.fixture
async def fleet(kept_fleet: Fleet, http: aiohttp.ClientSession) -> AsyncIterator[Fleet]:
    """All of it, well."""
    await kept_fleet.whole_again(http, 3)
    yield kept_fleet


@pytest_asyncio.fixture
async def two_nodes(kept_fleet: Fleet, http: aiohttp.ClientSession) -> AsyncIterator[Fleet]:
    """At least two nodes of it."""
    await kept_fleet.whole_again(http, 2)
    yield kept_fleet


class Losing:
    """Does something to the node that serves, once an answer has so many tokens; once for each number."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, *counts: int) -> None:
        self.fleet, self.http, self.left = fleet, http, list(counts)
        self.nodes: list[str] = []
        self.had: list[int] = []
        self.harmed = 0

    async def __call__(self, answer: Answer) -> None:
        if self.left and len(answer.token_ids) >= self.left[0]:
            self.left.pop(0)
            self.nodes.append(await self.fleet.serving(self.http))
            self.had.append(len(answer.token_ids))
            await self.harm(self.nodes[-1])
            self.harmed += 1

    async def is_done(self, _: aiohttp.ClientSession) -> bool:
        return self.harmed > 0

    async def harm(self, node: str) -> None:
        await asyncio.to_thread(self.fleet.lose, node)


async def test_a_node_that_hangs_is_lost_in_time_and_taken_back_when_it_wakes(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    class Freezing(Losing):
        async def harm(self, node: str) -> None:
            await asyncio.to_thread(fleet.freeze, node)

    freeze = Freezing(fleet, http, 20)
    try:
        answer = await fleet.stream(http, GREEDY, freeze)
        require_whole(answer)
        assert outcome_of(answer) == ("recomputed", 1)
        # A little more than the setting: the questions before the first that was not answered do not count.
        assert LOST_AFTER_S - 0.5 < answer.gap_s < 2 * LOST_AFTER_S + 2
        assert await fleet.state(http, freeze.nodes[0]) == "lost"
    finally:
        for node in freeze.nodes:
            fleet.thaw(node)
    await fleet.until_state(http, freeze.nodes[0], "ready", limit_s=10)
    # It gives up what it had: its gateway has left.
    await until(fleet.nodes[freeze.nodes[0]]._idle, http, limit_s=10)


async def test_when_the_gateway_is_killed_its_clients_are_cut_off_and_its_nodes_give_the_work_up(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    async def harm(answer: Answer) -> None:
        if len(answer.token_ids) >= 20:
            await asyncio.to_thread(fleet.lose_gateway)

    answer = await fleet.stream(http, {**GREEDY, "max_tokens": 2000}, harm)
    assert not answer.done
    for node in fleet.nodes.values():
        await until(node._idle, http, limit_s=10)
    ended = [s for node in fleet.nodes.values() for s in (await node.sessions(http))[-1:]]
    assert "cancelled" in {s["state"] for s in ended}


async def test_a_gateway_with_another_secret_says_why_it_has_no_nodes(
    fleet: Fleet, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    other = tmp_path / "secret"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o600)
    fleet.lose_gateway()
    await fleet.start_gateway(secret=other)
    try:
        async with http.get(f"{fleet.url}/readyz") as ready:
            assert ready.status == 503
            told = await ready.json()
        assert set(told["troubles"]) == set(fleet.nodes)
        assert all("the same secret" in why for why in told["troubles"].values())
        assert fleet.log.read_text().count("event=node_silent") == len(fleet.nodes)
        asked = {"model": MODEL, "prompt": "x", "stream": True}
        began_s = time.monotonic()
        async with http.post(fleet.url + COMPLETIONS, json=asked) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert time.monotonic() - began_s < 2
        for node in fleet.nodes.values():
            # Once, and not with every question.
            assert node.process.log.read_text().count("signed with another secret") == 1
    finally:
        fleet.lose_gateway()


async def test_nodes_that_are_killed_in_a_row_cost_a_stream_two_pauses_and_no_answer(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    wanted = await fleet.stream(http, GREEDY)
    require_whole(wanted)
    assert outcome_of(wanted) == ("undisturbed", 0)
    unstreamed: list[asyncio.Task[Answer]] = []

    class LosingWithCompany(Losing):
        async def harm(self, node: str) -> None:
            if not self.left:
                # Three for two nodes: some of them are where the stream is.
                unstreamed.extend(asyncio.create_task(fleet.whole(http, GREEDY)) for _ in range(3))
                await until(self._all_run, http)
            await super().harm(node)

        async def _all_run(self, _: aiohttp.ClientSession) -> bool:
            running = [s["node"] for s in await fleet.sessions(http) if s["state"] == "running"]
            return len(running) == 4 and running.count(self.nodes[-1]) > 1

    lose = LosingWithCompany(fleet, http, 20, 60)
    answer = await fleet.stream(http, GREEDY, lose)
    require_whole(answer)
    assert len(set(lose.nodes)) == 2
    assert outcome_of(answer) == ("recomputed", 2)
    assert len(answer.token_ids) == GREEDY["max_tokens"]
    # What the client had is what it has: the undisturbed run's, and nothing of it is said twice.
    assert answer.token_ids[: lose.had[0]] == wanted.token_ids[: lose.had[0]]
    whole = await asyncio.gather(*unstreamed)
    assert [(one.status, len(one.token_ids)) for one in whole] == [(200, GREEDY["max_tokens"])] * 3
    told = [s for s in await fleet.sessions(http) if s["outcomes"]]
    outcomes = [[o["outcome"] for o in s["outcomes"]] for s in told]
    assert outcomes.count(["recomputed", "recomputed"]) == 1
    assert outcomes.count(["restarted"]) >= 1
    assert not {s["node"] for s in told} & set(lose.nodes)
    async with http.get(f"{fleet.url}/readyz") as ready:
        assert ready.status == 200


async def test_a_node_that_is_stopped_ends_what_it_has_and_loses_nothing(
    two_nodes: Fleet, http: aiohttp.ClientSession
) -> None:
    fleet = two_nodes

    class Ending(Losing):
        async def harm(self, node: str) -> None:
            fleet.end(node)

    end = Ending(fleet, http, 20)
    streaming = asyncio.create_task(fleet.stream(http, GREEDY, end))
    await until(end.is_done, http)
    short = {**GREEDY, "max_tokens": 8}
    others = await asyncio.gather(*(fleet.stream(http, short) for _ in range(6)))
    require_whole(*others)
    assert {outcome_of(answer) for answer in others} == {("undisturbed", 0)}
    answer = await streaming
    require_whole(answer)
    assert outcome_of(answer) == ("undisturbed", 0)
    [ended] = [s for s in await fleet.sessions(http) if s["session"] == answer.session]
    assert ended["node"] == end.nodes[0]
    await fleet.until_state(http, end.nodes[0], "draining", "lost", limit_s=5)
    fleet.lose(end.nodes[0])


async def test_a_stream_that_demands_exactness_ends_where_no_node_can_go_on_so(
    two_nodes: Fleet, http: aiohttp.ClientSession
) -> None:
    fleet = two_nodes
    lose = Losing(fleet, http, 20)
    answer = await fleet.stream(http, GREEDY, lose, X_Midstream_Policy="exact")
    assert answer.error is not None
    assert answer.error["code"] == "not_exact"
    assert len(answer.token_ids) >= 20
    assert len(answer.token_ids) < GREEDY["max_tokens"]
    wanted = await fleet.stream(http, GREEDY)
    # Nothing that another node would have computed was sent.
    assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)]
