"""A node drains, and its sessions go on exactly on the other one: real nodes with engines, and a gateway in front."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.client import Answer
from midstream.session.errors import Refused
from midstream.session.ports import free_ports
from midstream.sidecar.control_client import ControlClient
from support.gateways import Fleet, fleets
from support.peers import make_fleet
from support.sidecars import Sidecar, outcome_of, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

BODY: dict[str, Any] = {
    "prompt": "What leaves a node, another one has to take", "temperature": 0.8, "seed": 5, "presence_penalty": 0.7,
    # The tiny model writes some hundred a second.
    "max_tokens": 1800,
}  # fmt: skip
CUT = 150


@pytest_asyncio.fixture
async def fleet(command: list[str], tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two nodes that keep what others bring, and bring nothing by themselves."""
    made = make_fleet(tmp_path / "files")
    ports = dict(zip(("node-0", "node-1"), free_ports(2), strict=True))

    def of_each(name: str) -> dict[str, object]:
        return {
            **made.settings,
            "replicas.listen": f"127.0.0.1:{ports[name]}", "replicas.memory_bytes": 256 << 20,
            "store.dir": str(tmp_path / f"store-{name}"), "supervise.stop_timeout_s": 30,
        }  # fmt: skip

    with fleets(tmp_path, command) as make:
        fleet = make(of_each=of_each)
        assert made.files.secret is not None
        fleet.secret = made.files.secret
        # Of such a small model no answer takes long.
        fleet.gateway_settings = {"gateway.poll_s": 0.1, "drain.short_s": 0}
        await fleet.start()
        yield fleet


async def test_a_draining_nodes_session_goes_on_exactly_elsewhere_and_stays_where_the_drain_is_cancelled(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
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

    # The other one is alone now: there is nowhere to go, and its drain is taken back before its deadline.
    [left] = set(fleet.nodes) - set(ended)
    folder = fleet.nodes[left].process.state_dir
    began: list[str] = []

    async def order_and_cancel(answer: Answer) -> None:
        if not began and len(answer.token_ids) >= CUT:
            began.append(left)
            async with ControlClient(folder) as control:
                assert (await control.drain(deadline_s=60))["phase"] == "draining"
                await fleet.until_state(http, left, "draining")
                assert (await control.cancel_drain())["phase"] == "serving"

    answer = await fleet.stream(http, BODY, order_and_cancel)
    require_whole(answer)
    assert began
    assert outcome_of(answer) == ("undisturbed", 0)
    assert answer.same_as(wanted)
    await fleet.until_state(http, left, "ready")


async def test_a_drained_workers_sessions_go_on_exactly_at_the_other_one_and_it_is_started_again_by_a_cancel(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession
) -> None:
    sidecar = await asyncio.to_thread(start, settings={"drain.short_s": 0})
    bodies = [{**BODY, "seed": seed} for seed in range(2)]
    wanted = [await sidecar.stream(http, body) for body in bodies]
    require_whole(*wanted)
    async with ControlClient(sidecar.process.state_dir) as control:

        async def drained() -> None:
            async with asyncio.timeout(30):
                while sum(len(s["outcomes"]) == 0 for s in await sidecar.sessions(http)) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await control.drain(worker="worker-0", deadline_s=60)
            async with asyncio.timeout(60):
                while (await control.drains())["workers"]["worker-0"]["phase"] != "over":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        *answers, _ = await asyncio.gather(*(sidecar.stream(http, body) for body in bodies), drained())
        require_whole(*answers)
        assert all(answer.same_as(other) for answer, other in zip(answers, wanted, strict=True))
        outcomes = [outcome_of(answer) for answer in answers]
        assert ("exact", 1) in outcomes
        assert set(outcomes) <= {("exact", 1), ("undisturbed", 0)}
        assert await sidecar.metric(http, "midstream_drain_pause_seconds_count") == outcomes.count(("exact", 1))
        assert (await sidecar.worker(http))["state"] in ("stopped", "draining")
        with pytest.raises(Refused, match="not being drained"):
            await control.cancel_drain(worker="worker-1")
        await control.cancel_drain(worker="worker-0")
    await sidecar.ready(http)
    require_whole(await sidecar.stream(http, BODY))
