"""Real SGLangs of kinds that were not seen to go on exactly: they serve, say by name why not, and sessions survive."""

from pathlib import Path

import aiohttp
import pytest

from midstream.loadtest.client import POLICY_HEADER, read_stream
from midstream.loadtest.harness import Victim
from support.even_model import even
from support.sglang_rig import SglangRig
from support.vllm_rig import CHAT, Case, chat, undisturbed, whole_model

pytestmark = [pytest.mark.engine, pytest.mark.apart, pytest.mark.timeout(400)]

CUT = 20
BODY = chat("Write a long story about a dog named Max.", presence_penalty=0.4, ignore_eos=True, max_tokens=400)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        pytest.param(("--page-size", "1"), "page_size", id="pages of one token"),
        # What both ranks make of a session's old outputs has to be one and the same, or they compute nonsense together.
        pytest.param(("--tp-size", "2"), "tensor_parallel", id="two ranks"),
    ],
)
async def test_what_was_not_tested_is_named_and_computed_again(
    options: tuple[str, ...], word: str, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    # Its heads can be shared out between two ranks, as those of the demo's model cannot.
    rig = SglangRig(*options, workers=2, model=even(whole_model(), tmp_path / "even"))
    try:
        await rig.sidecar.start(http, timeout_s=240)
        refused = await read_stream(http, rig.sidecar.url + CHAT, dict(BODY), headers={POLICY_HEADER: "exact"})
        assert refused.status == 422
        assert word in str(refused.error)
        cases = [Case(BODY, cut=CUT)]
        [wanted] = await undisturbed(rig, http, cases)
        [got] = await rig.interrupted(http, cases, Victim.CORE, outcomes=("recomputed",))
        assert got.whole, (got.violations, got.error)
        assert "outcome=recomputed takeovers=1" in got.report
        assert got.token_ids[:CUT] == wanted.token_ids[:CUT]
        assert (len(got.token_ids), got.usage) == (len(wanted.token_ids), wanted.usage)
    finally:
        rig.stop()
