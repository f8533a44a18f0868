"""`midstream serve` beside vLLMs that are started, killed and started again by hand."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from midstream.loadtest.client import Answer, read_stream
from midstream.session.lifeline import Hold, LifelineFile
from midstream.session.ports import free_port
from support.vllm_by_hand import ByHand
from support.vllm_rig import ASK_REPORT, CHAT, START_S, chat

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

# On a CPU the only worker is a process of its own.
HOLDERS = ("VllmWorker-0", "EngineCore", "front end")
# Long enough that on a busy machine, too, a kill that is ordered at its beginning comes before its end.
BODY = chat("Write a long story about a dog named Max.", temperature=0.8, seed=5, max_tokens=240, ignore_eos=True)


class Site:
    """A sidecar and two engines, each with a life of its own."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port() for _ in range(3)]
        self._folder = folder
        self._state = folder / "state"
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.engines = {
            name: ByHand(folder, name, port, {"MIDSTREAM_STATE_DIR": str(self._state), "MIDSTREAM_WORKER": name})
            for name, port in zip("ab", ports[1:], strict=True)
        }
        self._sidecar: subprocess.Popen[bytes] | None = None

    def start_sidecar(self) -> None:
        """Start it, and wait until it offers a place to each engine."""
        workers = [word for name, e in self.engines.items() for word in ("--worker", f"{name}={e.url}")]
        argv = [
            sys.executable, "-m", "midstream.sidecar.cli", "serve", *workers,
            "--port", self.url.rsplit(":", 1)[1], "--state-dir", str(self._state),
        ]  # fmt: skip
        with (self._folder / "sidecar.log").open("ab") as sink:
            self._sidecar = subprocess.Popen(argv, stdout=sink, stderr=sink)
        deadline_s = time.monotonic() + 30
        while not all((self._state / "workers" / name / "ticket.json").exists() for name in self.engines):
            assert time.monotonic() < deadline_s, (self._folder / "sidecar.log").read_text()
            time.sleep(0.05)

    def kill_sidecar(self) -> None:
        """SIGKILL it; its holder and the engines live on."""
        if self._sidecar is not None:
            self._sidecar.kill()
            self._sidecar.wait(10)
            self._sidecar = None

    def stop(self) -> None:
        """End all of it."""
        for engine in self.engines.values():
            engine.kill()
        self.kill_sidecar()
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self._state) in word for word in process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    async def workers(self, http: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        """What the sidecar says of them, by name."""
        with suppress(aiohttp.ClientError):
            async with http.get(f"{self.url}/midstream/v1/status") as answer:
                return {w["name"]: w for w in (await answer.json())["workers"]}
        return {}

    def holders(self, name: str, epoch: int) -> dict[str, Hold]:
        """Which processes of an engine hold a lifeline."""
        with closing(LifelineFile(self._state / "workers" / name / f"{epoch}.lifeline")) as file:
            return {file.holder(address).name: hold for hold, address, _ in file.look()}

    def lost_by_lifeline(self) -> int:
        """How many deaths a lifeline told of."""
        return (self._folder / "sidecar.log").read_text().count(" by=lifeline ")

    async def wait_ready(self, http: aiohttp.ClientSession, names: str = "ab") -> None:
        """Wait until workers are ready and their plugin is known."""
        deadline_s = time.monotonic() + START_S
        while True:
            workers = await self.workers(http)
            if all(n in workers and workers[n]["state"] == "ready" and workers[n]["pools"] for n in names):
                return
            assert time.monotonic() < deadline_s, (workers, (self._folder / "sidecar.log").read_text()[-4000:])
            await asyncio.sleep(0.1)

    async def interrupted(self, http: aiohttp.ClientSession, at: int, *, again: bool = False) -> tuple[str, Answer]:
        """One answer whose engine is killed at output `at`, and started again at once if told so."""
        killed: list[str] = []

        def kill(answer: Answer) -> Any:
            return None if killed or len(answer.token_ids) < at else self._kill_serving(http, killed, again)

        answer = await read_stream(http, self.url + CHAT, BODY, headers=ASK_REPORT, on_tokens=kill)
        assert killed
        return killed[0], answer

    async def _kill_serving(self, http: aiohttp.ClientSession, killed: list[str], again: bool) -> None:
        [name] = [n for n, w in (await self.workers(http)).items() if w["sessions"]]
        killed.append(name)
        await asyncio.to_thread(self.engines[name].kill)
        if again:
            self.engines[name].start()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The sidecar first, as the documentation says, then the engines."""
    site = Site(tmp_path_factory.mktemp("attach"))
    try:
        site.start_sidecar()
        for engine in site.engines.values():
            engine.start()
        for engine in site.engines.values():
            engine.wait_ready()
        yield site
    finally:
        site.stop()


async def test_engines_of_others_are_survived_restarted_and_outlive_the_sidecar(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.wait_ready(http)
    for name, worker in (await site.workers(http)).items():
        assert site.holders(name, worker["epoch"]) == dict.fromkeys(HOLDERS, Hold.HELD)
    wanted = await read_stream(http, site.url + CHAT, BODY)
    assert wanted.whole
    # One dies: its session goes on at the other.
    name, answer = await site.interrupted(http, 12)
    assert answer.same_as(wanted)
    assert "outcome=exact takeovers=1" in answer.report
    # The only one left dies and is started again by hand: its session waits for it.
    name, answer = await site.interrupted(http, 20, again=True)
    assert answer.same_as(wanted)
    assert "outcome=exact takeovers=1" in answer.report
    # The sidecar dies and is started again: it finds the engines where they are.
    [dead] = set(site.engines) - {name}
    site.engines[dead].start()
    site.engines[dead].wait_ready()
    await site.wait_ready(http)
    site.kill_sidecar()
    site.start_sidecar()
    await site.wait_ready(http)
    _, answer = await site.interrupted(http, 16)
    assert answer.same_as(wanted)
    assert "outcome=exact takeovers=1" in answer.report
    # On a machine that has other things to do a pidfd may tell as soon, but not each time.
    assert site.lost_by_lifeline() > 0


async def test_a_core_whose_front_end_alone_was_killed_writes_into_nobodys_pool(
    site: Site, http: aiohttp.ClientSession
) -> None:
    for engine in site.engines.values():
        if engine.process is None:
            engine.start()
            engine.wait_ready()
    await site.wait_ready(http)
    wanted = await read_stream(http, site.url + CHAT, BODY)
    names: list[str] = []
    left: list[psutil.Process] = []

    async def kill_front_end(answer: Answer) -> None:
        if names or len(answer.token_ids) < 12:
            return
        [name] = [n for n, w in (await site.workers(http)).items() if w["sessions"]]
        names.append(name)
        left.extend(site.engines[name].kill_front_end())

    answer = await read_stream(http, site.url + CHAT, BODY, headers=ASK_REPORT, on_tokens=kill_front_end)
    [name] = names
    assert {p.name() if p.is_running() else "gone" for p in left} <= {"gone", "VLLM::EngineCor", "VLLM::Worker"}
    assert answer.same_as(wanted)
    assert "outcome=exact takeovers=1" in answer.report
    # The core serves nobody: the sidecar has ended it, so that the next start may run in its pool.
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, 30)
    assert not alive
    async with http.get(f"{site.url}/metrics") as metrics:
        assert f'midstream_orphans_killed_total{{worker="{name}"}}' in await metrics.text()
    site.engines[name].start()
    site.engines[name].wait_ready()
    await site.wait_ready(http)
    assert (await site.workers(http))[name]["adopted"]
