"""Workers of a sidecar are parked: their sessions leave first, they come back with proof, and when they are needed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from midstream.adapters.cuda_checkpoint.driver import ProcessState
from midstream.adapters.cuda_checkpoint.machine import Limits, ParkState
from midstream.proxy.coordinator import Reason
from midstream.session.errors import ParkError
from midstream.session.ports import free_port
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.worker import WorkerDrain
from midstream.sidecar.parking.journal import Journal
from midstream.sidecar.parking.workers import Parking
from midstream.sidecar.processes import read_process
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Worker
from support.coordinating import Engine, Rig, asked
from support.sim_cuda import DRIVER, VARIABLE, SimCuda, wait_for
from support.sim_trainers import GIB, SUPPORT, environ

# Many processes, real ones.
pytestmark = pytest.mark.service

LIMITS = Limits(check_s=10, guest_s=6, lock_s=1, answer_s=0.5, copy_s=3, unlock_s=2, settle_s=0.5, kill_s=5)


class Node:
    """A sidecar's workers, each with a real process that has a simulated GPU, and what parks them."""

    def __init__(self, folder: Path, sim: SimCuda, stack: ExitStack) -> None:
        self.folder = folder
        self.sim = sim
        self.rig = Rig(folder)
        self.let_go: list[list[str]] = []
        self._stack = stack
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.parking = self.new_parking()

    def new_parking(self) -> Parking:
        """What a sidecar that is started has."""
        return Parking(
            self.rig.workers, self.rig.coordinator, Journal(self.folder / "state"), limits=LIMITS,
            drain_of=self._drain_of, let_go=self._release, count=self._counted, driver=DRIVER, free_bytes=64 * GIB,
        )  # fmt: skip

    def _counted(self, order: str, state: str) -> None:
        self.rig.metrics.parkings.labels(order, state).inc()

    def _drain_of(self, worker: Worker) -> WorkerDrain:
        async def stay() -> None: ...

        here = Here(self.rig.workers, self.rig.coordinator, lambda pool: None, 8)
        return WorkerDrain(worker, here, self.rig.coordinator, self.rig.metrics, at_once=4, short_s=0, end=stay)

    async def _release(self, pools: Any, epoch: Epoch) -> None:
        self.let_go.append(list(pools))

    def start(self, name: str, gpu: str = "GPU-0", *more: str) -> Engine:
        """A worker that is ready."""
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "support.sim_server",
            str(self.sim.path),
            str(port),
            "--held",
            f"{gpu}={GIB}",
            *more,
        ]
        popen = self.servers[name] = subprocess.Popen(command, env=environ(self.sim))
        self._stack.callback(popen.wait)
        self._stack.callback(popen.kill)
        wait_for(lambda: _listens(port), 10, lambda: f"{name} does not listen")
        engine = self.rig.start(name)
        process = read_process(popen.pid)
        assert process is not None
        # Beside the one that has CUDA an engine has others.
        own = read_process(os.getpid())
        assert own is not None
        both = [[own.pid, own.started], [process.pid, process.started]]
        engine.epoch.facts = {**engine.epoch.facts, "processes": both}
        self.rig.workers.get(name).url = f"http://127.0.0.1:{port}"
        return engine

    @property
    def ready(self) -> list[str]:
        return [worker.name for worker in self.rig.workers.ready()]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ms-park-")))
        sim = stack.enter_context(SimCuda(folder))
        monkeypatch.setenv(VARIABLE, str(sim.path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        yield Node(folder, sim, stack)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_parked_worker_takes_no_sessions_and_comes_back_as_one_whose_kv_nobody_holds(node: Node) -> None:
    engine = node.start("w0")
    outcome = await node.parking.park("w0")
    worker = node.rig.workers.get("w0")
    assert (outcome.state, outcome.text) == (ParkState.PARKED, "")
    assert (node.ready, worker.parked, worker.text) == ([], True, "parked")
    assert node.sim.free("GPU-0") == node.sim.total["GPU-0"]
    await until(lambda: node.let_go)
    assert node.let_go == [["w0/1/0"]]
    back = await node.parking.unpark("w0", ["GPU-1"])
    assert back.state is ParkState.RUNNING
    assert (node.ready, worker.parked, worker.text) == (["w0"], False, "")
    text = node.rig.metrics.render()
    assert b'midstream_parkings_total{order="park",state="parked"} 1.0' in text
    assert b'midstream_parkings_total{order="unpark",state="running"} 1.0' in text
    assert engine.epoch.pools == []
    assert engine.epoch.exact_obstacles == ["no_pool"]
    await node.parking.close()


async def test_an_engine_that_can_sleep_sleeps_before_and_is_woken_before_it_proves_itself(node: Node) -> None:
    node.start("w0", "GPU-0", "--sleeps")
    url = node.rig.workers.get("w0").url
    assert (await node.parking.park("w0")).state is ParkState.PARKED
    async with aiohttp.ClientSession(url) as http, http.get("/is_sleeping") as answer:
        assert (await answer.json())["is_sleeping"]
    outcome = await node.parking.unpark("w0")
    assert (outcome.state, outcome.text) == (ParkState.RUNNING, "")
    async with aiohttp.ClientSession(url) as http, http.get("/is_sleeping") as answer:
        assert not (await answer.json())["is_sleeping"]
    await node.parking.close()


async def test_an_engine_that_sleeps_is_woken_too_when_it_is_not_parked_after_all(node: Node) -> None:
    node.start("w0", "GPU-0", "--sleeps")
    node.sim.fail["lock", node.servers["w0"].pid] = "NOT_READY"
    outcome = await node.parking.park("w0")
    assert outcome.state is ParkState.RUNNING
    url = node.rig.workers.get("w0").url
    async with aiohttp.ClientSession(url) as http, http.get("/is_sleeping") as answer:
        assert not (await answer.json())["is_sleeping"]
    assert node.ready == ["w0"]
    await node.parking.close()


async def test_a_worker_whose_answer_has_changed_meanwhile_is_killed(node: Node) -> None:
    node.start("w0")
    await node.parking.park("w0")
    node.servers["w0"].send_signal(signal.SIGUSR1)
    outcome = await node.parking.unpark("w0")
    assert outcome.state is ParkState.GONE
    assert "answers otherwise than before" in outcome.text
    assert await asyncio.to_thread(node.servers["w0"].wait, 5) == -signal.SIGKILL
    await node.parking.close()


async def test_sessions_go_to_another_worker_before_anything_is_locked(node: Node) -> None:
    engine = node.start("w0")
    placement = await node.rig.coordinator.admit(asked())
    engine.admit(placement, 10, 20)
    other = node.start("w1", "GPU-1")
    parking = asyncio.create_task(node.parking.park("w0"))
    async with asyncio.timeout(5):
        assert await placement.interrupted is Reason.MOVE
    assert node.sim.calls == []
    moved = await node.rig.over(placement, 10, reason=Reason.MOVE)
    assert moved.worker == "w1"
    other.admit(moved, 30)
    node.rig.coordinator.resumed(asked(), moved, 0.05)
    # As an engine does when the request is closed.
    engine.finish("abort")
    outcome = await parking
    assert outcome.state is ParkState.PARKED, outcome.text
    await node.parking.close()


async def test_a_worker_with_sessions_and_nobody_to_take_them_is_not_parked(node: Node) -> None:
    engine = node.start("w0")
    placement = await node.rig.coordinator.admit(asked())
    engine.admit(placement, 10, 20)
    outcome = await node.parking.park("w0")
    assert outcome.state is ParkState.RUNNING
    assert outcome.text.startswith("sessions: ")
    assert (node.ready, node.sim.calls) == (["w0"], [])
    await node.parking.close()


async def test_a_standby_comes_back_by_itself_when_nobody_else_is_ready(node: Node) -> None:
    node.start("w0")
    serving = node.start("w1", "GPU-1")
    assert (await node.parking.park("w0")).state is ParkState.PARKED
    keeping = asyncio.create_task(node.parking.keep())
    # The memory of whoever died is not free at once.
    node.sim.others["GPU-0"] = node.sim.total["GPU-0"]
    node.rig.die(serving)
    assert node.rig.workers.coming()
    await asyncio.sleep(1.2)
    assert node.rig.workers.get("w0").parked
    node.sim.others.clear()
    await until(lambda: node.ready == ["w0"])
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await node.parking.close()


async def test_the_only_worker_stays_parked_until_it_is_asked_for(node: Node) -> None:
    node.start("w0")
    await node.parking.park("w0")
    keeping = asyncio.create_task(node.parking.keep())
    await asyncio.sleep(1.2)
    assert node.ready == []
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await node.parking.close()


async def test_a_sidecar_that_is_started_again_adopts_what_was_parked(node: Node) -> None:
    node.start("w0")
    await node.parking.park("w0")
    await node.parking.close()
    worker = node.rig.workers.get("w0")
    worker.leaving = worker.parked = False
    parking = node.new_parking()
    parking.begin()
    # From the first moment, and not only when the driver has said what it is.
    assert node.ready == []
    await until(lambda: parking.told() == {"w0": "parked"} and not parking._busy["w0"].locked())
    assert (await parking.unpark("w0")).state is ParkState.RUNNING
    assert node.ready == ["w0"]
    await parking.close()


async def test_what_was_parked_of_engines_that_ended_with_their_sidecar_is_ended_and_forgotten(node: Node) -> None:
    node.start("w0")
    await node.parking.park("w0")
    await node.parking.close()
    node.servers["w0"].kill()
    await asyncio.to_thread(node.servers["w0"].wait, 5)
    parking = node.new_parking()
    parking.begin()
    await until(lambda: not node.rig.workers.get("w0").parked)
    assert Journal(node.folder / "state").names() == []
    assert node.ready == ["w0"]
    await parking.close()


async def test_a_parked_worker_that_dies_is_forgotten_and_its_next_start_takes_sessions(node: Node) -> None:
    node.start("w0")
    await node.parking.park("w0")
    node.servers["w0"].kill()
    worker = node.rig.workers.get("w0")
    await until(lambda: not worker.parked)
    await until(lambda: node.parking.told() == {})
    assert not worker.leaving
    assert Journal(node.folder / "state").names() == []
    await node.parking.close()


async def test_what_cannot_be_done_is_refused_with_its_reason(node: Node) -> None:
    engine = node.start("w0")
    for name, said in (("w9", "there is no worker"),):
        with pytest.raises(ParkError, match=said):
            await node.parking.park(name)
    with pytest.raises(ParkError, match="not parked"):
        await node.parking.unpark("w0")
    known = engine.epoch.facts["processes"]
    engine.epoch.facts["processes"] = known[:1]
    with pytest.raises(ParkError, match="not-cuda"):
        await node.parking.park("w0")
    engine.epoch.facts["processes"] = [[known[1][0], known[1][1] + 1]]
    with pytest.raises(ParkError, match="gone"):
        await node.parking.park("w0")
    engine.epoch.facts["processes"] = known
    node.rig.workers.became(node.rig.workers.get("w0"), WorkerState.STARTING)
    with pytest.raises(ParkError, match="is starting"):
        await node.parking.park("w0")
    assert node.sim.state(node.servers["w0"].pid) is ProcessState.RUNNING
    await node.parking.close()


async def test_an_operator_asks_on_the_control_socket(node: Node) -> None:
    node.start("w0")
    app = web.Application()
    app.router.add_routes(node.parking.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    path = str(node.folder / "control.sock")
    await web.UnixSite(runner, path).start()
    async with aiohttp.ClientSession("http://sidecar", connector=aiohttp.UnixConnector(path)) as http:
        async with http.post("/workers/w0/park", json={}) as answer:
            told = await answer.json()
            assert (told["ok"], told["state"], "checkpointing" in told["seconds"]) == (True, "parked", True)
        async with http.post("/workers/w0/park", json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (409, "not_parked")
        async with http.post("/workers/w0/unpark", json={"gpus": ["GPU-7"]}) as answer:
            told = await answer.json()
            assert (told["ok"], told["state"], told["text"].split(":")[0]) == (False, "parked", "map")
        async with http.post("/workers/w0/unpark", json={"gpus": []}) as answer:
            assert (await answer.json())["state"] == "running"
    await node.parking.close()
    await runner.cleanup()
