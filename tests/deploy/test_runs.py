"""What the chart's containers run in a shell, run for real: processes for containers, a folder for the pod's memory.

The sidecar and the holder are midstream's own, and the engine is a process that takes its place as engines do. Ends of
containers are played as runtimes end them in pods with one namespace of processes: with all that they have started.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from midstream.session.held import HolderClient, create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.session.ports import free_port
from support.charts import Charts, Rendered

# A sidecar that shares its processors with engines takes its time to start.
pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]
PLACES = ("/run/midstream", "/etc/midstream")


class Pod:
    """Starts and ends the containers of one pod."""

    def __init__(self, rendered: Rendered, root: Path, port: int, engine_port: int) -> None:
        self._rendered = rendered
        self._root = root
        self.port = port
        self.engine_port = engine_port
        self.folder = root / "run" / "midstream"
        self._started: list[subprocess.Popen[bytes]] = []
        for place in PLACES:
            (root / place[1:]).mkdir(parents=True)
        settings = self._here(rendered.settings_file).replace("0.0.0.0", "127.0.0.1")
        (root / "etc" / "midstream" / "midstream.yaml").write_text(settings)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
        told = {entry["name"]: entry.get("value", "127.0.0.1") for entry in rendered.container("midstream")["env"]}
        if "MIDSTREAM_FLEET_URL" in told:
            self.environ["MIDSTREAM_FLEET_URL"] = told["MIDSTREAM_FLEET_URL"].replace("$(POD_IP)", told["POD_IP"])
        self.environ["PATH"] = f"{Path(sys.executable).parent}:{self.environ['PATH']}"

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """The container `name`, once its startup probe has passed."""
        container = self._rendered.container(name)
        process = self.spawn(container["command"])
        probe = [self._here(word) for word in container["startupProbe"]["exec"]["command"]]
        until(lambda: subprocess.run(probe, env=self.environ, check=False).returncode == 0)
        return process

    def ends(self, name: str) -> "subprocess.Popen[bytes]":
        """Run the preStop hook of a container, as the kubelet does."""
        return self.spawn(self._rendered.container(name)["lifecycle"]["preStop"]["exec"]["command"])

    def engine_environ(self) -> dict[str, str]:
        """What the engine's processes have."""
        told = {entry["name"]: self._here(entry["value"]) for entry in self._rendered.engines[0]["env"]}
        return {**self.environ, **{name: value for name, value in told.items() if name.startswith("MIDSTREAM_")}}

    def ask(self, path: str) -> int:
        """The status with which the sidecar answers; 0 if it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except urllib.error.URLError:
            return 0

    def close(self) -> None:
        for process in reversed(self._started):
            kill_container(process)

    def spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """The first process of a container."""
        # Their clocks tick faster, but for the sidecar's own.
        words = [
            self._here(word).replace("sleep 1\n", "sleep 0.05\n").replace("sleep 5 ", "sleep 0.5 ") for word in command
        ]
        self._started.append(process := subprocess.Popen(words, env=self.environ))
        return process

    def _here(self, text: str) -> str:
        for place in PLACES:
            text = text.replace(place, f"{self._root}{place}")
        return text


def kill_container(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to a container's first process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        until(lambda: not any(map(runs, below)))
    process.wait(10)


def runs(process: psutil.Process) -> bool:
    """Whether anything of it is left that whoever collects the dead has not just still to collect."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def until(condition: Callable[[], bool], within_s: float = 90) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose name is short: those of sockets in it may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        yield Path(folder)


@pytest.fixture
def pod(chart: Charts, place: Path) -> Iterator[Pod]:
    port, engine_port = free_port(), free_port()
    values: dict[str, Any] = {
        "sidecar": {"port": port},
        "engine": {"port": engine_port},
        "drain": {"delaySeconds": 0, "deadlineSeconds": 20},
        "config": {"arena": {"slot_count": 4, "page_count": 16}},
    }
    running = Pod(chart.render(values), place, port, engine_port)
    try:
        yield running
    finally:
        running.close()


def claim(pod: Pod) -> list[str]:
    """An engine's first process takes the place that is offered; returns its holder and arena."""
    code = (
        "import os; from midstream.session.ticket import claim_place; claim_place(os.environ); "
        "print(os.environ['MIDSTREAM_HOLDER'], os.environ['MIDSTREAM_ARENA'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=pod.engine_environ(), capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_when_the_sidecar_has_started_an_engine_finds_its_place(pod: Pod) -> None:
    pod.start("holder")
    pod.start("midstream")
    assert (pod.ask("/live"), pod.ask("/readyz")) == (200, 503)
    holder, arena = claim(pod)
    assert holder == str(pod.folder / "state" / "holder.sock")
    assert Path(arena) == pod.folder / "state" / "workers" / "engine-0" / "1.arena"
    assert Path(arena).stat().st_size > 0
    # The next start of the engine, of which no probe knows, has its place as well.
    until(lambda: (Path(arena).parent / "ticket.json").exists())
    assert claim(pod)[1].endswith("2.arena")


def test_pools_outlive_the_sidecars_container(pod: Pod) -> None:
    pod.start("holder")
    sidecar = pod.start("midstream")
    holder = HolderClient(pod.folder / "state" / "holder.sock")
    fd = create_host_pool(4096)
    layout = PoolLayout(block_count=1, block_tokens=16, planes=(Plane(0, 4096, 4096),))
    holder.put(
        "engine-0/1/0", fd, PoolMeta(4096, layout, layout.fingerprint(), {"pid": os.getpid(), "fd": fd}).to_json()
    )
    os.close(fd)
    kill_container(sidecar)
    assert [pool.name for pool in holder.list()] == ["engine-0/1/0"]
    pod.start("midstream")
    # Its place was offered before, so the probe passes at once.
    until(lambda: pod.ask("/live") == 200)
    assert [pool.name for pool in holder.list()] == ["engine-0/1/0"]


def test_a_holder_that_died_is_there_again_and_its_container_lives(pod: Pod) -> None:
    container = pod.start("holder")
    [holder] = psutil.Process(container.pid).children()
    holder.kill()
    client = HolderClient(pod.folder / "state" / "holder.sock")
    until(lambda: answers(client))
    assert container.poll() is None


def answers(client: HolderClient) -> bool:
    try:
        client.list()
    except Exception:
        return False
    return True


def test_a_holder_that_is_told_to_end_leaves_nobody_behind(pod: Pod) -> None:
    container = pod.start("holder")
    below = psutil.Process(container.pid).children()
    assert len(below) == 1
    container.send_signal(signal.SIGTERM)
    assert container.wait(10) == 0
    until(lambda: not any(map(runs, below)))


def test_at_the_end_of_a_pod_the_sidecar_goes_first_and_the_engines_wait_for_it(pod: Pod) -> None:
    pod.start("holder")
    sidecar = pod.start("midstream")
    engine = pod.ends("engine-0")
    assert pod.ends("midstream").wait(10) == 0
    assert engine.wait(30) == 0
    assert not (pod.folder / "state" / "url").exists()
    # It ends what it has to end by itself, whenever its SIGTERM comes.
    assert sidecar.wait(30) == 0


async def test_a_gateway_finds_the_pod_and_is_believed(chart: Charts, place: Path) -> None:
    port, gateway_port = free_port(), free_port()
    values = {
        "sidecar": {"port": port},
        "engine": {"port": free_port()},
        "gateway": {"enabled": True},
        "fleet": {"secretName": "fleet"},
        "config": {"arena": {"slot_count": 4, "page_count": 16}, "gateway": {"poll_s": 0.1}},
    }
    rendered = chart.render(values)
    pod = Pod(rendered, place, port, values["engine"]["port"])
    try:
        secret = place / "etc" / "midstream-fleet" / "secret"
        secret.parent.mkdir()
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o440)
        await asyncio.to_thread(pod.start, "holder")
        await asyncio.to_thread(pod.start, "midstream")
        file = place / "gateway.yaml"
        # A name of the cluster's, for which there is none here; both would listen on one port.
        node = f"{rendered.workload['metadata']['name']}-0.{rendered.workload['spec']['serviceName']}"
        text = rendered.gateway_settings_file.replace(node, "127.0.0.1").replace(
            f"port: {port}", f"port: {gateway_port}"
        )
        file.write_text(text.replace("/etc/midstream", f"{place}/etc/midstream").replace("0.0.0.0", "127.0.0.1"))
        command = gateway_command(rendered)
        await asyncio.to_thread(pod.spawn, [*command[:-1], str(file)])

        def nodes() -> list[str]:
            with suppress(urllib.error.URLError):
                address = f"http://127.0.0.1:{gateway_port}/midstream/v1/status"
                with urllib.request.urlopen(address, timeout=5) as answer:
                    return [node["readiness"] for node in json.load(answer)["nodes"]]
            return []

        # It has answered a request that only the fleet may make; no engine of it is there.
        await asyncio.to_thread(until, lambda: nodes() == ["not-ready"])
    finally:
        pod.close()


def gateway_command(rendered: Rendered) -> list[str]:
    assert rendered.gateway is not None
    [container] = rendered.gateway["spec"]["template"]["spec"]["containers"]
    return list(container["command"])


async def slow_answer(request: web.Request) -> web.StreamResponse:
    """An engine's stream of 20 tokens, which takes two seconds."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(20):
        finish = "stop" if number == 19 else None
        choice = {"index": 0, "text": f" {number}", "finish_reason": finish}
        event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(0.1)
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_an_answer_that_runs_at_the_end_of_a_pod_comes_to_its_own_end(pod: Pod) -> None:
    async def well(_: web.Request) -> web.Response:
        return web.Response()

    engine = web.Application()
    engine.add_routes([web.get("/health", well), web.post("/v1/completions", slow_answer)])
    runner = web.AppRunner(engine)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", pod.engine_port).start()
        await asyncio.to_thread(pod.start, "holder")
        await asyncio.to_thread(pod.start, "midstream")
        await asyncio.to_thread(until, lambda: pod.ask("/readyz") == 200)
        url = f"http://127.0.0.1:{pod.port}/v1/completions"
        body = {"model": "m", "prompt": "count", "stream": True}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            text = (await answer.content.readuntil(b"\n\n")).decode()
            hook = await asyncio.to_thread(pod.ends, "engine-0")
            await asyncio.to_thread(pod.ends, "midstream")
            await asyncio.to_thread(until, lambda: pod.ask("/readyz") == 503)
            assert hook.poll() is None
            text += (await answer.content.read()).decode()
        assert [f'" {number}"' in text for number in range(20)] == [True] * 20
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(hook.wait, 30) == 0
    finally:
        await runner.cleanup()


def test_an_engine_waits_as_long_as_answers_run_and_no_longer(pod: Pod) -> None:
    # A sidecar that still has answers: it lives, and its address is told.
    (pod.folder / "state").mkdir(mode=0o700)
    (pod.folder / "state" / "url").write_text("http://127.0.0.1:1")
    stand_in = subprocess.Popen(["sleep", "60"])
    try:
        (pod.folder / "pid").write_text(str(stand_in.pid))
        (pod.folder / "ending").touch()
        engine = pod.ends("engine-0")
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(0.7)
        (pod.folder / "state" / "url").unlink()
        assert engine.wait(5) == 0
    finally:
        stand_in.kill()
        stand_in.wait()


def test_an_engine_does_not_wait_for_a_sidecar_that_is_dead(pod: Pod) -> None:
    (pod.folder / "state").mkdir(mode=0o700)
    (pod.folder / "state" / "url").write_text("http://127.0.0.1:1")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (pod.folder / "pid").write_text(str(gone.pid))
    (pod.folder / "ending").touch()
    assert pod.ends("engine-0").wait(5) == 0


def test_an_engine_waits_no_longer_than_a_drain_may_take(pod: Pod) -> None:
    (pod.folder / "state").mkdir(mode=0o700)
    (pod.folder / "state" / "url").write_text("http://127.0.0.1:1")
    (pod.folder / "pid").write_text(str(os.getpid()))
    (pod.folder / "ending").touch()
    assert pod.ends("engine-0").wait(20) == 0


def test_an_engine_that_alone_is_ended_does_not_wait(pod: Pod) -> None:
    pod.start("holder")
    pod.start("midstream")
    began_s = time.monotonic()
    assert pod.ends("engine-0").wait(10) == 0
    assert time.monotonic() - began_s < 5
    assert pod.ask("/live") == 200


def test_the_health_check_of_an_engine_fails_where_nobody_listens(pod: Pod, chart: Charts) -> None:
    [*command, _] = chart.render().engines[0]["livenessProbe"]["exec"]["command"]
    command[0] = sys.executable

    def check(port: int) -> int:
        return subprocess.run([*command, str(port)], capture_output=True, check=False, cwd="/").returncode

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert check(nobody.getsockname()[1]) != 0
    pod.start("holder")
    pod.start("midstream")
    # Its own /health says that no worker is ready: a status other than 200 is no life, either.
    assert check(pod.port) != 0
