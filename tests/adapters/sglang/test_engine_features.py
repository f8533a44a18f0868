"""Two real SGLang workers, everything that a request can ask for, and a session that is moved in the midst of it.

As with vLLM (tests/adapters/vllm/test_engine_features.py), but for what only one of them has.
"""

import asyncio
import json

import pytest

from support.moved_features import Feature, Results, of, require_same, run_all
from support.sglang_features import FEATURES
from support.sglang_rig import COMPACT, SglangRig
from support.vllm_rig import shallow_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# A long prompt takes several steps.
OPTIONS = (*COMPACT, "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, several at once; what went wrong in one is told by its own test."""
    rig = SglangRig(
        *OPTIONS,
        workers=2,
        model=shallow_model(),
        store=tmp_path_factory.mktemp("store"),
        # Many cases share two cores: how long a copy takes is not what is tested here.
        settings={"restore.load_timeout_s": 60},
    )
    try:
        rig.start()
        return asyncio.run(run_all(rig.sidecar, FEATURES))
    finally:
        rig.stop()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_nobody_can_tell_a_moved_answer_from_an_undisturbed_one(ran: Results, feature: Feature) -> None:
    require_same(ran, feature)


def test_the_cases_are_what_their_names_say(ran: Results) -> None:
    """A case in which nothing of what it is about ever happened would pass for nothing."""
    schema = of(ran, "JSON schema").plain
    assert set(json.loads(schema.text(".content"))) == {"name", "age", "tags"}, schema.values
    for name in ("stop, no_stop_trim", "stop_token_ids", "stop_regex"):
        plain = of(ran, name).plain
        assert plain.values["choices.0.finish_reason"] == "stop", (name, plain.values)
    assert of(ran, "half characters").plain.text(".content").strip("😀🚀🌍") == ""
    assert "prompt_tokens" in (of(ran, "chunked prefill").plain.usage or {})
