"""SGLang as it is by default: with a prefix cache, overlapped steps and draws of its own; and in small pages.

One pair of workers, started as users start them. What is greedy goes on exactly, whoever else has its pages; what is
drawn says that it does not.
"""

from collections.abc import Iterator

import aiohttp
import pytest

from midstream.loadtest.client import POLICY_HEADER, read_stream
from midstream.loadtest.harness import Victim
from support.sglang_rig import SglangRig
from support.vllm_rig import CHAT, COMPLETIONS, Case, Rig, chat, completion, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

STORY = "Write a long story about a dog named Max."
SHARED = "The quick brown fox jumps over the lazy dog. " * 20
PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A sidecar with two workers."""
    rig = SglangRig("--page-size", str(PAGE_TOKENS), workers=2, deterministic=False, overlapped=True, spawned=True)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


async def test_sessions_that_share_pages_of_a_cached_prefix_go_on_after_the_scheduler_is_killed(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    cases = [Case(completion(SHARED + tail), COMPLETIONS, cut=20 if not tail else 0) for tail in ("", "A cat", "Two")]
    # Once for each worker's cache.
    wanted = await undisturbed(rig, http, cases)
    got = await rig.interrupted(http, cases, Victim.CORE)
    require_same(cases, wanted, got)
    hits = [int(line.split("#cached-token: ")[1].split(",")[0]) for line in prefills(rig)]
    assert max(hits) >= len(SHARED) // 8, "no prefill found a prefix in the cache"
    assert all(hit % PAGE_TOKENS == 0 for hit in hits)
    # Those that were taken up are in no cache, and what comes after them is as it was.
    again = [await rig.ask(http, case) for case in cases]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in wanted]


def prefills(rig: Rig) -> list[str]:
    """What the engines' logs say of each prefill."""
    return [line for line in rig.sidecar.log.read_text(errors="replace").splitlines() if "#cached-token: " in line]


async def test_what_is_drawn_is_computed_again_and_refused_where_it_must_be_exact(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    drawn = chat(STORY, temperature=0.9, seed=5, ignore_eos=True)
    refused = await read_stream(http, rig.sidecar.url + CHAT, drawn, headers={POLICY_HEADER: "exact"})
    assert refused.status == 422
    assert "random_state" in str(refused.error)
    cases = [Case(drawn, cut=15), Case(chat(STORY, ignore_eos=True))]
    [plain] = await undisturbed(rig, http, cases[1:])
    one, other = await rig.interrupted(http, cases, Victim.TREE, outcomes=("recomputed", "exact"))
    assert one.whole, (one.violations, one.error)
    assert one.usage is not None
    assert one.usage["completion_tokens"] == len(one.token_ids) == 60
    assert "outcome=recomputed takeovers=1" in one.report
    require_same(cases[1:], [plain], [other])
