"""A sidecar with real vLLM workers, and what tests do with it: undisturbed answers, and kills in mid-stream.

Runs in float32, where the composition of a batch does not change which token is the likeliest: so many sessions can
die in one kill, which is what a start of vLLM costs.
"""

import asyncio
import atexit
import functools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from midstream.loadtest.client import Answer, read_stream, read_whole
from midstream.loadtest.harness import SidecarProcess, Victim, kill_worker
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.errors import Refused
from midstream.session.ticket import worker_dir
from midstream.sidecar.environments import VLLM_ENVIRON
from support import forking
from support.vllm_models import shallow

PYTHON_VARIABLE = "MIDSTREAM_TEST_VLLM_PYTHON"
MODEL_VARIABLE = "MIDSTREAM_TEST_MODEL"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCK_TOKENS = 128
START_S = 240.0
ADMISSION_S = 30.0
ASK_REPORT = {"X-Midstream-Report": "1"}
# A shallow model would fill an object with blanks for ever.
COMPACT = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
TRIES = 3
T = TypeVar("T")


def whole_model() -> Path:
    """The demo's model; skips the test where this machine has none."""
    model = os.environ.get(MODEL_VARIABLE)
    if not model:
        pytest.skip(f"{MODEL_VARIABLE} names no model; `make test` sets it")
    return Path(model)


def shallow_model() -> Path:
    """The demo's model without its middle layers, for those who do not care what it says."""
    return _shallow(whole_model())


@functools.cache
def _shallow(model: Path) -> Path:
    # Gone with this process.
    parent = tempfile.TemporaryDirectory(prefix="midstream-test-model-")
    atexit.register(parent.cleanup)
    return shallow(model, Path(parent.name) / "shallow")


def vllm_command(*options: str, model: Path | None = None) -> list[str]:
    """The command of one small worker (of a shallow model); skips the test where this machine has no vLLM."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no vLLM; `make test` sets it")
    folder = str(model or shallow_model())
    return [
        python, str(Path(python).with_name("vllm")), "serve", folder, "--served-model-name", "smollm2",
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", *options,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One request; `cut` is the number of outputs at which its worker is to die."""

    body: Mapping[str, Any]
    path: str = CHAT
    stream: bool = True
    cut: int = 0


def chat(prompt: str, **options: Any) -> dict[str, Any]:
    """The body of a greedy chat request."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 60}
    return {**body, **options}


def completion(prompt: str | list[int], **options: Any) -> dict[str, Any]:
    """The body of a greedy completion request."""
    return {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 60, **options}


FILLER = Case(chat("Count.", max_tokens=500, ignore_eos=True))


class Rig:
    """One sidecar and its workers."""

    def __init__(
        self,
        *options: str,
        workers: int,
        settings: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        model: Path | None = None,
    ) -> None:
        environ = {**VLLM_ENVIRON, forking.VARIABLE: "1", **(environ or {})}
        self.workers = workers
        self.sidecar = SidecarProcess(
            vllm_command(*options, model=model), workers=workers, environ=environ, settings=settings
        )

    def start(self) -> None:
        """Start it and wait for all workers."""

        async def up() -> None:
            async with aiohttp.ClientSession() as http:
                await self.sidecar.start(http, timeout_s=START_S)

        asyncio.run(up())

    def stop(self) -> None:
        """End all of it."""
        self.sidecar.stop()

    async def ask(self, http: aiohttp.ClientSession, case: Case, **more: Any) -> Answer:
        """One answer through the sidecar."""
        read = read_stream if case.stream else read_whole
        return await read(http, self.sidecar.url + case.path, dict(case.body), **more)

    async def ready(self, http: aiohttp.ClientSession, count: int | None = None) -> None:
        """Wait until all workers (or `count`) are ready."""
        await self.sidecar.wait_ready(http, count=count, timeout_s=START_S)

    async def interrupted(
        self,
        http: aiohttp.ClientSession,
        cases: Sequence[Case],
        victim: Victim,
        *,
        trigger: int = 0,
        outcomes: Sequence[str] = ("exact",),
    ) -> "list[Answer]":
        """Run all cases at once on one worker and kill it when the case `trigger` has come to its cut.

        Every one of them must have been interrupted, and an exact one must have found all its KV but the last position.
        """
        await self.ready(http)
        seen = {s["session"] for s in await self.sidecar.sessions(http)}
        killing: list[asyncio.Task[list[str]]] = []

        async def kill() -> list[str]:
            worker = await self.sidecar.serving(http)
            await self._begun(worker, len(cases))
            return kill_worker(worker["pid"], victim)

        def at_cut(answer: Answer) -> Any:
            if killing or len(answer.token_ids) < cases[trigger].cut:
                return None
            killing.append(asyncio.create_task(kill()))
            return killing[0]

        async with self._others_busy(http) as admitted:
            running = []
            for index, case in enumerate(cases):
                more = {"on_tokens": at_cut} if index == trigger else {}
                running.append(asyncio.create_task(self.ask(http, case, headers=ASK_REPORT, **more)))
                await admitted()
        answers = await asyncio.gather(*running)
        assert killing, f"the answer ended before token {cases[trigger].cut}: {answers[trigger]}"
        assert killing[0].result()
        told = [s for s in await self.sidecar.sessions(http) if s["session"] not in seen and s["outcomes"]]
        assert len(told) == len(cases), "not every session was on the worker that died"
        for session in told:
            [outcome] = session["outcomes"]
            assert outcome["outcome"] in outcomes, outcome
            # Logprobs of what was journaled and not delivered died with the engine: it is computed again.
            assert outcome["lag"] == 0 or any(case.body.get("logprobs") for case in cases), outcome
            if outcome["outcome"] == "exact":
                assert outcome["kv_tokens_loaded"] > 0, outcome
                assert outcome["tokens_recomputed"] == 1, outcome
        return answers

    async def _begun(self, worker: Mapping[str, Any], count: int) -> None:
        """Wait until so many sessions of a worker have a token each; on a busy machine the last may have none yet."""
        path = worker_dir(self.sidecar.state_dir, worker["name"]) / f"{worker['epoch']}.arena"
        with closing(ArenaReader(path)) as reader:
            async with asyncio.timeout(ADMISSION_S):
                while sum(bool(reader.journal(s)) for s in reader.slots() if s.state is SlotState.LIVE) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _others_busy(self, http: aiohttp.ClientSession) -> "AsyncIterator[Callable[[], Awaitable[None]]]":
        """While this lasts, each session that was admitted is answered by one of a filler on every other worker."""
        fillers: list[asyncio.Task[Answer]] = []

        # By name and not by number: the list of those that are over has an end.
        known = {s["session"] for s in await self.sidecar.sessions(http)}

        async def one_more() -> None:
            async with asyncio.timeout(ADMISSION_S):
                while not (new := {s["session"] for s in await self.sidecar.sessions(http)} - known):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            known.update(new)

        async def admitted() -> None:
            await one_more()
            for _ in range(self.workers - 1):
                fillers.append(asyncio.create_task(self.ask(http, FILLER)))
                await one_more()

        try:
            yield admitted
        finally:
            for filler in fillers:
                filler.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)


# A session that is over is told so, or is not known any more.
OVER = ("ended", "no_session")


async def before_its_end(attempt: Callable[[], Awaitable[T]]) -> T:
    """What comes of an attempt to move a session in the midst of its answer, as soon as that was not over before.

    Its owner writes on until the move is asked for, and on a busy machine that may be all of it.
    """
    for _ in range(TRIES - 1):
        try:
            return await attempt()
        except Refused as refused:
            if refused.reason not in OVER:
                raise
    return await attempt()


async def undisturbed(rig: Rig, http: aiohttp.ClientSession, cases: Sequence[Case]) -> list[Answer]:
    """What the answers are when nothing happens."""
    answers = [await rig.ask(http, case, headers=ASK_REPORT) for case in cases]
    for answer in answers:
        assert answer.whole, (answer.violations, answer.error)
    return answers


def require_same(
    cases: Sequence[Case],
    wanted: Sequence[Answer],
    got: Sequence[Answer],
    *,
    takeovers: int = 1,
    outcomes: Sequence[str] = ("exact",),
) -> None:
    """Each answer is whole and what it would have been; streams say how they were taken over."""
    expected = outcomes if takeovers else ("undisturbed",)
    for case, plain, answer in zip(cases, wanted, got, strict=True):
        assert answer.whole, (case, answer.violations, answer.error)
        # Logprobs depend a little on who else is in the batch; nothing else may.
        assert answer.logprobs == pytest.approx(plain.logprobs, abs=1e-3), case
        told = replace(answer, logprobs=plain.logprobs, alternatives=plain.alternatives)
        assert told.same_as(plain), (case, answer, plain)
        if case.stream:
            assert any(f"outcome={o} takeovers={takeovers}" in answer.report for o in expected), (case, answer.report)
