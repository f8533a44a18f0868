"""SGLang takes a running request's pages away when they run out, and computes it again later: what becomes of sessions.

SGLang's own switch for tests does it every few steps, so that it happens to sessions in all states: running, just taken
up, about to die.
"""

from collections.abc import Iterator

import aiohttp
import pytest

from midstream.loadtest.harness import Victim
from support.sglang_features import DRAWN, LIST, PENALTIES, STORY
from support.sglang_rig import SglangRig
from support.vllm_rig import COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.apart, pytest.mark.timeout(400)]

EVERY_STEPS = "11"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A sidecar with two workers that retract all the time."""
    environ = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": EVERY_STEPS}
    rig = SglangRig(workers=2, environ=environ)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


async def test_what_was_retracted_says_what_it_would_have_said_also_after_a_death(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [
        Case(chat(STORY), cut=30),
        Case(chat(STORY, seed=5, **DRAWN, **PENALTIES)),
        Case(chat("SQL.", ebnf=LIST)),
        Case(completion(STORY, temperature=1, seed=9, ignore_eos=True), COMPLETIONS),
    ]
    wanted = await undisturbed(rig, http, cases)
    before = retractions(rig)
    # Whoever had just lost its pages when its worker died has no KV to go on from.
    got = await rig.interrupted(http, cases, Victim.CORE, outcomes=("exact", "recomputed"))
    require_same(cases, wanted, got, outcomes=("exact", "recomputed"))
    assert retractions(rig) > before + 2
    outcomes = [s["outcomes"][0]["outcome"] for s in await rig.sidecar.sessions(http) if s["outcomes"]]
    assert "exact" in outcomes, outcomes


def retractions(rig: Rig) -> int:
    """How many requests have lost their pages, as the engines' logs tell."""
    lines = rig.sidecar.log.read_text(errors="replace").splitlines()
    return sum(int(line.split("#retracted_reqs: ")[1].split(",")[0]) for line in lines if "#retracted_reqs: " in line)
