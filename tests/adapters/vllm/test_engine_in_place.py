"""One real vLLM and no standby: the engine that is started again takes up its old pool, and its sessions in it."""

from collections.abc import Iterator

import aiohttp
import pytest

from midstream.loadtest.harness import Victim
from support.vllm_rig import BLOCK_TOKENS, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

STORY = "Write a long story about a dog named Max."
# More than one block, so that those who begin with it share one.
SHARED = "Once upon a time there was a small town by the sea, where everybody knew everybody. " * 11
# Room for ten blocks: four sessions of three blocks each are two too many.
BLOCK_COUNT = 11


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A sidecar with one worker that has little room."""
    rig = Rig("--max-model-len", "512", "--num-gpu-blocks-override", str(BLOCK_COUNT), workers=1)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


async def test_sessions_that_share_blocks_all_go_on_in_the_old_pool(rig: Rig, http: aiohttp.ClientSession) -> None:
    shared = [completion(f"{SHARED}{name} was", max_tokens=40) for name in ("Anna", "Bruno")]
    cases = [
        Case(shared[0], COMPLETIONS, cut=12),
        Case(shared[1], COMPLETIONS),
        Case(chat(STORY, temperature=0.9, seed=5, presence_penalty=0.7)),
        Case(chat(STORY), stream=False),
    ]
    wanted = await undisturbed(rig, http, cases)
    assert wanted[0].usage is not None
    assert wanted[0].usage["prompt_tokens"] > BLOCK_TOKENS
    got = await rig.interrupted(http, cases, Victim.CORE)
    require_same(cases, wanted, got)
    [worker] = await rig.sidecar.workers(http)
    assert worker["adopted"]
    # What was taken over is in the prefix cache now, and as good as what the engine computes itself.
    require_same(cases, wanted, await undisturbed(rig, http, cases), takeovers=0)


async def test_a_session_that_was_preempted_never_gets_blocks_that_are_another_s(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [
        Case(completion(f"{SHARED[i:]}{name} was", max_tokens=100), COMPLETIONS)
        for i, name in enumerate(("Anna", "Bruno", "Carla", "Dario"))
    ]
    wanted = await undisturbed(rig, http, cases)
    assert wanted[0].usage is not None
    cut = 2 * BLOCK_TOKENS - wanted[0].usage["prompt_tokens"] + 8
    assert 10 < cut < 90
    cases[0] = Case(cases[0].body, COMPLETIONS, cut=cut)
    before = await rig.preemptions(http)
    at_kill: list[float] = []

    async def count() -> None:
        at_kill.append(await rig.preemptions(http))

    got = await rig.interrupted(http, cases, Victim.TREE, outcomes=("exact", "recomputed"), before=count)
    assert at_kill[0] > before, "there was room for everybody"
    require_same(cases, wanted, got, outcomes=("exact", "recomputed"))
    assert "outcome=exact" in got[0].report
