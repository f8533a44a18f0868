"""Real vLLMs on a GPU whose cores are killed: whatever their sessions ask for goes on as if nothing had happened.

In vLLM's batch-invariant mode, in which the company of other sessions changes no number: so many different sessions
can die in each kill, which is what a start of vLLM costs.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from midstream.loadtest.aim import snapshot_exists
from midstream.loadtest.client import Answer
from midstream.loadtest.gpu.fleet import Fleet, fleet
from midstream.loadtest.gpu.models import serve, small_options
from midstream.loadtest.harness import SidecarProcess, Victim, kill_worker
from support.vllm_rig import ASK_REPORT, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

NAMES = ("a", "b")
START_S = 400.0
BACK_S = 240.0
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# A prompt that is found in the cache is computed in other pieces than one that is not, and that is seen in the numbers.
OPTIONS = (*small_options(), "--no-enable-prefix-caching")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# As served to the requests of the rig that this borrows.
SERVED_AS = "smollm2"
STORY = "Write a long story about a dog named Max."
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 100
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
# A small model writes hundreds of tokens a second: what was admitted first must last until the last one has its cut.
TOKENS, TOKENS_DISK, CUT = 700, 2000, 60
DISK: dict[str, object] = {"restore.tiers": "disk", "store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8}


class RigOf(Rig):
    """The rig's way to ask, on a sidecar that runs already."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.sidecar = sidecar


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client with patience for an engine's restart."""
    timeout = aiohttp.ClientTimeout(total=BACK_S + 60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two engines beside a state folder, started by hand, which outlive the sidecars of single tests."""
    async with fleet(tmp_path_factory.mktemp("engines")) as both:
        for name in NAMES:
            both.add(name, serve(small_model, *OPTIONS, served_as=SERVED_AS), environ=INVARIANT)
        await both.front(NAMES)
        for engine in both.engines.values():
            engine.start()
        await both.ready(NAMES, timeout_s=START_S)
        yield both


def sessions_of_all_kinds(tokens: int) -> list[Case]:
    """Greedy and sampled, with seeds, penalties, a grammar and logprobs, short prompts and long ones; each twice."""
    return [case for turn in (0, 1) for case in _sessions(tokens, turn)]


def _sessions(tokens: int, turn: int) -> list[Case]:
    common = {"max_tokens": tokens, "ignore_eos": True}
    story = f"{turn}. {STORY}"
    digits = {**common, "ignore_eos": False, "structured_outputs": {"regex": "([0-9]{3}-){600}"}}
    return [
        Case(chat(story, **common)),
        Case(chat(story, temperature=0.9, seed=5 + turn, top_p=0.95, **PENALTIES, **common)),
        Case(chat(story, **PENALTIES, **common)),
        Case(chat(f"Numbers, {turn}.", **digits)),
        Case(chat(story, temperature=0.8, seed=3 + turn, logprobs=True, top_logprobs=2, **common)),
        Case(completion(f"{turn}. {LONG_PROMPT}", temperature=1, seed=7 + turn, **common), COMPLETIONS),
        Case(completion(story, temperature=1.1, seed=9 + turn, top_k=40, min_p=0.02, **common), COMPLETIONS),
    ]


async def require_exact(
    sidecar: SidecarProcess,
    http: aiohttp.ClientSession,
    cases: Sequence[Case],
    tier: str,
    *,
    store: Path | None = None,
) -> list[Answer]:
    """Run all cases undisturbed, then at once, and kill the core of the worker that has the most of them.

    It is killed when each answer has some tokens, and a snapshot where there is a store. Every session that it had must
    go on exactly, from that tier, as the undisturbed answer does. Returns the undisturbed answers.

    In place is where all that was journaled goes on. With logprobs a session goes on from what its client has: where
    that is less, its KV is copied into other blocks, which is the tier `held` even if the pool is the same.
    """
    rig = RigOf(sidecar)
    wanted = await all_at_once(rig, http, cases)
    known = {s["session"] for s in await sidecar.sessions(http)}
    counts = [0] * len(cases)

    async def ask(index: int) -> Answer:
        def count(answer: Answer) -> None:
            counts[index] = len(answer.token_ids)

        return await rig.ask(http, cases[index], headers=ASK_REPORT, on_tokens=count)

    running = [asyncio.create_task(ask(index)) for index in range(len(cases))]
    async with asyncio.timeout(60):
        while min(counts) < CUT or not await have_snapshots(sidecar, http, store, known):
            assert not any(task.done() for task in running), f"an answer was through before the kill: {counts}"
            await asyncio.sleep(0.002)
    victim = max(await sidecar.workers(http), key=lambda worker: int(worker["sessions"]))
    [killed] = kill_worker(victim["pid"], Victim.CORE)
    assert "EngineCore" in killed, killed
    got = await asyncio.gather(*running)
    told = {s["session"]: s for s in await sidecar.sessions(http) if s["session"] not in known}
    if tier == "in-place":
        adopted = [worker["adopted"] for worker in await sidecar.workers(http)]
        assert all(adopted), placements(sidecar)
    hit = [i for i, answer in enumerate(got) if told[answer.session]["outcomes"]]
    assert len(hit) >= len(cases) // 2, f"{len(hit)} of {len(cases)} sessions were on {victim['name']}: {told}"
    for index in hit:
        [outcome] = told[got[index].session]["outcomes"]
        came_from = "held" if tier == "in-place" and outcome["lag"] else tier
        assert (outcome["outcome"], outcome["tier"]) == ("exact", came_from), (outcome, placements(sidecar))
        assert outcome["kv_tokens_loaded"] > 0, outcome
        if tier != "disk":
            assert outcome["tokens_recomputed"] == 1, outcome
            # With logprobs it goes on from what its client has, which may be less than what was journaled.
            assert outcome["lag"] == 0 or cases[index].body.get("logprobs"), outcome
    require_same([cases[i] for i in hit], [wanted[i] for i in hit], [got[i] for i in hit])
    return wanted


def placements(sidecar: SidecarProcess) -> str:
    """What engines and sidecar have written of pools, adoption and takeovers."""
    lines = sidecar.log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if "midstream: " in line or "event=" in line)


async def all_at_once(rig: Rig, http: aiohttp.ClientSession, cases: Sequence[Case]) -> list[Answer]:
    """What the answers are when nothing happens."""
    each = await asyncio.gather(*(undisturbed(rig, http, [case]) for case in cases))
    return [answer for [answer] in each]


async def have_snapshots(
    sidecar: SidecarProcess, http: aiohttp.ClientSession, store: Path | None, known: set[Any]
) -> bool:
    """Whether each new session has a snapshot in the store; true without a store."""
    if store is None:
        return True
    new = [s["session"] for s in await sidecar.sessions(http) if s["session"] not in known]
    return all(snapshot_exists(store, session) for session in new)


async def begin_again(engines: Fleet) -> None:
    """Every engine runs again, and the sidecar knows it."""
    for name in NAMES:
        if (await engines.worker(name))["state"] != "ready":
            await engines.begin_again(name)
    await engines.ready(NAMES, timeout_s=BACK_S)


async def test_the_pools_of_both_engines_lie_on_the_gpu_and_nothing_stands_in_the_way_of_exactness(
    engines: Fleet, http: aiohttp.ClientSession
) -> None:
    for name in NAMES:
        worker = await engines.worker(name)
        assert worker["pools"], engines.engines[name].last_lines()
        assert worker["key"] is not None
        assert worker["plugin"]["hook_errors"] == 0, engines.engines[name].last_lines()
    assert engines.sidecar is not None
    insists = {**ASK_REPORT, "X-Midstream-Policy": "exact"}
    answer = await RigOf(engines.sidecar).ask(http, Case(chat("Say hi.")), headers=insists)
    assert answer.whole, (answer.error, answer.violations)


async def test_everything_goes_on_exactly_from_the_pool_of_a_killed_core(
    engines: Fleet, http: aiohttp.ClientSession
) -> None:
    assert engines.sidecar is not None
    await require_exact(engines.sidecar, http, sessions_of_all_kinds(TOKENS), "held")


async def test_everything_goes_on_exactly_from_snapshots_on_disk(
    engines: Fleet, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = tmp_path_factory.mktemp("store")
    await begin_again(engines)
    sidecar = await engines.front(NAMES, settings=DISK, store=store)
    await engines.ready(NAMES, timeout_s=60)
    await require_exact(sidecar, http, sessions_of_all_kinds(TOKENS_DISK), "disk", store=store)


async def test_without_a_standby_everything_goes_on_in_the_pool_that_the_dead_engine_left(
    small_model: Path, http: aiohttp.ClientSession
) -> None:
    command = serve(small_model, *OPTIONS, served_as=SERVED_AS)
    sidecar = SidecarProcess(command, workers=1, environ={**OFFLINE, **INVARIANT})
    try:
        await sidecar.start(http, timeout_s=START_S)
        cases = sessions_of_all_kinds(TOKENS)
        wanted = await require_exact(sidecar, http, cases, "in-place")
        # What goes on in the old pool's blocks after that is as good as it was in a pool of its own.
        require_same(cases, wanted, await all_at_once(RigOf(sidecar), http, cases), takeovers=0)
    finally:
        await asyncio.to_thread(sidecar.stop)
