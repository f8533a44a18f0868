"""A vLLM and an SGLang of one model behind one sidecar: KV of the one is never given to the other.

Both ways, a session whose engine dies is computed again over its old tokens; where it must be exact, it waits for an
engine of its own kind. One that is moved by plan stays where its KV fits.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.adapters.sglang.adapter import SglangAdapter
from midstream.loadtest.client import POLICY_HEADER, Answer, read_stream
from midstream.loadtest.harness import SidecarProcess, Victim, kill_worker
from midstream.session.ids import SessionId
from midstream.session.ports import free_port
from midstream.sidecar import plugin_path
from midstream.sidecar.control_client import ControlClient
from midstream.sidecar.environments import SGLANG_ENVIRON
from support.sglang_rig import sglang_command
from support.vllm_by_hand import ByHand
from support.vllm_rig import ASK_REPORT, CHAT, chat, shallow_model

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.apart, pytest.mark.timeout(600)]

TOKENS = 200
BODY = chat("Write a long story about a dog named Max.", max_tokens=TOKENS, ignore_eos=True)
EXACT = {POLICY_HEADER: "exact"}
KINDS = {"v": "vllm", "s": "sglang"}


class SglangByHand(ByHand):
    """An SGLang that is started by hand, as docs/sglang.md says."""

    def __init__(self, folder: Path, name: str, port: int, environ: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
        told = SglangAdapter().attach(name, Path(environ["MIDSTREAM_STATE_DIR"]))
        path = str(plugin_path.ensure(folder))
        self._environ = {**inherited, **SGLANG_ENVIRON, **told.env, **environ, "PYTHONPATH": path}
        self._command = [*sglang_command(model=shallow_model()), "--port", str(port), *told.argv]
        self.process = None


class Site:
    """The sidecar and the two engines, each of which can be started again."""

    def __init__(self, folder: Path) -> None:
        state, ports = folder / "state", [free_port() for _ in KINDS]
        environ = [{"MIDSTREAM_STATE_DIR": str(state), "MIDSTREAM_WORKER": name} for name in KINDS]
        self.engines: dict[str, ByHand] = {
            "v": ByHand(folder, "v", ports[0], environ[0]),
            "s": SglangByHand(folder, "s", ports[1], environ[1]),
        }
        beside = [f"{name}={engine.url}" for name, engine in self.engines.items()]
        self.sidecar = SidecarProcess([], beside=beside, state_dir=state)

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Start the sidecar, which offers places, and then the engines that take them."""
        starting = asyncio.create_task(self.sidecar.start(http, timeout_s=240))
        tickets = [self.sidecar.state_dir / "workers" / name / "ticket.json" for name in KINDS]
        async with asyncio.timeout(30):
            while not all(ticket.exists() for ticket in tickets):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for engine in self.engines.values():
            engine.start()
        await starting
        await self.known(http)

    async def known(self, http: aiohttp.ClientSession) -> None:
        """Wait until both are ready, and the sidecar knows what they are."""
        async with asyncio.timeout(240):
            while True:
                workers = await self.sidecar.workers(http)
                if all(w["state"] == "ready" and w["pools"] for w in workers):
                    break
                await asyncio.sleep(0.1)
        assert {w["name"]: w["key"]["engine"] for w in workers} == KINDS

    async def sessions_on(self, http: aiohttp.ClientSession) -> dict[str, str]:
        """Which worker has each session."""
        return {s["session"]: s["worker"] for s in await self.sidecar.sessions(http)}

    def stop(self) -> None:
        """End all of it."""
        for engine in self.engines.values():
            engine.kill()
        self.sidecar.stop()
        self.sidecar.kill_holder()


@pytest.fixture
def site() -> Iterator[Site]:
    """Both engines; the folder's name is short for the sake of sockets."""
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        site = Site(Path(folder))
        try:
            yield site
        finally:
            site.stop()


async def test_kv_of_one_engine_is_no_kv_for_another(site: Site, http: aiohttp.ClientSession) -> None:
    await site.start(http)
    undisturbed = {name: await (await _begin(site, http, name)).reading for name in KINDS}
    for victim, heir in (("v", "s"), ("s", "v")):
        wanted = undisturbed[victim]
        assert len(wanted.token_ids) == TOKENS
        async with ControlClient(site.sidecar.state_dir) as control:
            moved = await _begin(site, http, victim)
            await control.move(SessionId(moved.session), at=10)
            answer, outcome = await moved.reading, await _outcome(site, http, moved.session)
        # By plan it stays where its KV fits.
        assert answer.token_ids == wanted.token_ids
        assert (outcome["outcome"], outcome["worker"]) == ("exact", victim), outcome
        exact, plain = await _begin(site, http, victim, EXACT), await _begin(site, http, victim)
        while min(len(exact.seen.token_ids), len(plain.seen.token_ids)) < 12:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        process = site.engines[victim].process
        assert process is not None
        assert kill_worker(process.pid, Victim.TREE)
        answer = await plain.reading
        outcome = await _outcome(site, http, plain.session)
        # Everything that was said stays said, and what follows is the other engine's.
        assert answer.whole, (answer.violations, answer.error)
        cut = int(outcome["cut"])
        assert cut >= 12
        assert answer.token_ids[:cut] == wanted.token_ids[:cut]
        assert len(answer.token_ids) == TOKENS
        assert (outcome["outcome"], outcome["worker"], outcome["kv_tokens_loaded"]) == ("recomputed", heir, 0), outcome
        assert "engine" in outcome["detail"], outcome
        # Who must go on exactly has waited for an engine of its own kind.
        assert not exact.reading.done()
        await asyncio.to_thread(site.engines[victim].kill)
        site.engines[victim].start()
        answer, outcome = await exact.reading, await _outcome(site, http, exact.session)
        assert answer.whole, (answer.violations, answer.error)
        assert answer.token_ids == wanted.token_ids
        assert (outcome["outcome"], outcome["worker"]) == ("exact", victim), outcome
        await site.known(http)


class _Begun:
    """A session that has begun: its answer so far, and the task that reads it."""

    def __init__(self) -> None:
        self.seen = Answer()
        self.begun = asyncio.Event()
        self.reading: asyncio.Task[Answer]

    def note(self, answer: Answer) -> None:
        self.seen = answer
        self.begun.set()

    @property
    def session(self) -> str:
        """The sidecar's name for it."""
        return self.seen.session


async def _begin(
    site: Site, http: aiohttp.ClientSession, worker: str, headers: Mapping[str, str] | None = None
) -> _Begun:
    """A session on that worker, which has some tokens; those that another one takes are given up."""
    for _ in range(20):
        begun = _Begun()
        asked = {**ASK_REPORT, **(headers or {})}
        begun.reading = asyncio.create_task(
            read_stream(http, site.sidecar.url + CHAT, dict(BODY), headers=asked, on_tokens=begun.note)
        )
        await begun.begun.wait()
        if (await site.sessions_on(http)).get(begun.session) == worker:
            return begun
        # It stays where it is until there is one of ours, so that the next one goes elsewhere.
        following = asyncio.create_task(_give_up_later(begun.reading))
        following.add_done_callback(lambda task: task.exception())
        await asyncio.sleep(0.05)
    raise AssertionError(f"no session came to {worker}")


async def _give_up_later(reading: "asyncio.Task[Answer]") -> None:
    await asyncio.sleep(1.0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def _outcome(site: Site, http: aiohttp.ClientSession, session: str) -> dict[str, Any]:
    [outcome] = next(s["outcomes"] for s in await site.sidecar.sessions(http) if s["session"] == session)
    told: dict[str, Any] = outcome
    return told
