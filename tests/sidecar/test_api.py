"""The sidecar's own routes: alive, ready, measured, and told to people and programs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from midstream.proxy.coordinator import SessionFacts
from midstream.session.arena import Counter, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.sidecar import api
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Workers

S = SessionId("5" * 32)
FACTS = SessionFacts(S, "/v1/completions", {"prompt": "secret"}, True)
KEY = {name: name for name in REQUIRED}


class Api:
    """The routes over one worker, which is not ready yet."""

    def __init__(self, folder: Path) -> None:
        self.workers = Workers(let_go=lambda epoch: None)
        metrics = Metrics()
        mover = MoverClient(folder / "mover.sock")
        self.coordinator = SidecarCoordinator(self.workers, mover, metrics, CoordinatorSettings())
        self.worker = self.workers.add("w0", "http://w0")
        self.workers.became(self.worker, WorkerState.STARTING)
        self.app = web.Application()
        self.app.add_routes(api.routes(self.workers, self.coordinator, metrics, lambda: {"version": "1"}))
        self.arena = folder / "1.arena"

    def become_ready(self) -> None:
        create_arena(self.arena, slot_count=2, page_count=4)
        self.workers.begin_epoch(self.worker, 1, self.arena)
        writer = ArenaWriter.open(self.arena)
        writer.publish({"engine": "vllm", "key": KEY, "pools": ["w0/1/0"], "adopted": False})
        writer.count(Counter.HOOK_ERRORS)
        writer.close()
        self.workers.became(self.worker, WorkerState.READY, pid=77)


@pytest.fixture
def served(tmp_path: Path) -> Api:
    return Api(tmp_path)


@pytest.fixture
async def client(served: Api) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    async with TestClient(TestServer(served.app)) as client:
        yield client


Client = TestClient[web.Request, web.Application]


async def test_the_process_is_alive_before_any_worker_is(client: Client) -> None:
    answer = await client.get("/live")
    assert (answer.status, await answer.json()) == (200, {"status": "alive"})


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_it_is_ready_when_a_worker_is_and_until_it_drains(served: Api, client: Client, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status, await answer.json()) == (
        503, {"status": "not ready", "reason": "no worker is ready", "workers": {"w0": "starting"}}
    )  # fmt: skip
    served.become_ready()
    answer = await client.get(path)
    assert (answer.status, await answer.json()) == (200, {"status": "ready", "workers": {"w0": "ready"}})
    served.coordinator.draining = True
    answer = await client.get(path)
    assert (answer.status, (await answer.json())["reason"]) == (503, "draining")


async def test_metrics_count_workers_and_sessions_as_they_are_now(served: Api, client: Client) -> None:
    assert 'midstream_workers{state="starting"} 1.0' in await (await client.get("/metrics")).text()
    served.become_ready()
    await served.coordinator.admit(FACTS)
    answer = await client.get("/metrics")
    text = await answer.text()
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert 'midstream_workers{state="ready"} 1.0' in text
    assert "starting" not in text
    assert 'midstream_sessions{state="running"} 1.0' in text


async def test_status_tells_all_of_a_worker(served: Api, client: Client) -> None:
    served.become_ready()
    await served.coordinator.admit(FACTS)
    body = await (await client.get("/midstream/v1/status")).json()
    assert body["version"] == "1"
    (worker,) = body["workers"]
    assert worker["plugin"].pop("hook_errors") == 1
    assert set(worker.pop("plugin").values()) == {0}
    assert worker == {
        "name": "w0",
        "url": "http://w0",
        "state": "ready",
        "detail": "",
        "pid": 77,
        "restarts": 0,
        "epoch": 1,
        "sessions": 1,
        "engine": "vllm",
        "adopted": False,
        "key": KEY,
        "pools": ["w0/1/0"],
        "older_epochs": [],
    }


async def test_status_of_a_worker_that_never_came_up_or_is_gone(served: Api, client: Client) -> None:
    for came_up in (False, True):
        if came_up:
            served.become_ready()
        served.workers.became(served.worker, WorkerState.FAILED, "it ended before it was ready")
        (worker,) = (await (await client.get("/midstream/v1/status")).json())["workers"]
        assert (worker["state"], worker["epoch"], worker["key"], worker["plugin"]) == ("failed", 0, None, {})
        assert worker["detail"] == "it ended before it was ready"


async def test_epochs_that_are_kept_for_their_sessions_are_shown(served: Api, client: Client) -> None:
    served.become_ready()
    await served.coordinator.admit(FACTS)
    served.workers.became(served.worker, WorkerState.DEAD)
    served.workers.begin_epoch(served.worker, 2, None)
    (worker,) = (await (await client.get("/midstream/v1/status")).json())["workers"]
    assert worker["older_epochs"] == [{"epoch": 1, "sessions": 1}]
    assert worker["restarts"] == 1


async def test_sessions_are_told_without_their_content(served: Api, client: Client) -> None:
    served.become_ready()
    await served.coordinator.admit(FACTS)
    answer = await client.get("/midstream/v1/sessions")
    assert "secret" not in await answer.text()
    (session,) = (await answer.json())["sessions"]
    assert (session["session"], session["worker"], session["generation"], session["state"]) == (S, "w0", 1, "running")
    served.coordinator.ended(FACTS, "finished")
    (session,) = (await (await client.get("/midstream/v1/sessions")).json())["sessions"]
    assert session["state"] == "finished"
