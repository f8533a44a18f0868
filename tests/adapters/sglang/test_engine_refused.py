"""Real SGLangs of kinds that were not seen to go on exactly: they serve, say by name why not, and sessions survive."""

import aiohttp
import pytest

from midstream.loadtest.client import POLICY_HEADER, read_stream
from midstream.loadtest.harness import Victim
from support.sglang_rig import SglangRig
from support.vllm_rig import CHAT, Case, chat, require_same, undisturbed

pytestmark = [pytest.mark.engine, pytest.mark.apart, pytest.mark.timeout(400)]

STORY = "Write a long story about a dog named Max."


@pytest.mark.parametrize(
    ("options", "word"),
    [
        pytest.param(("--page-size", "1"), "page_size", id="pages of one token"),
        pytest.param(("--tp-size", "2"), "tensor_parallel", id="two ranks"),
    ],
)
async def test_what_was_not_tested_is_named_and_computed_again(
    options: tuple[str, ...], word: str, http: aiohttp.ClientSession
) -> None:
    rig = SglangRig(*options, workers=2)
    try:
        await rig.sidecar.start(http, timeout_s=240)
        refused = await read_stream(http, rig.sidecar.url + CHAT, chat(STORY), headers={POLICY_HEADER: "exact"})
        assert refused.status == 422
        assert word in str(refused.error)
        cases = [Case(chat(STORY), cut=20)]
        wanted = await undisturbed(rig, http, cases)
        got = await rig.interrupted(http, cases, Victim.CORE, outcomes=("recomputed",))
        require_same(cases, wanted, got, outcomes=("recomputed",))
    finally:
        rig.stop()
