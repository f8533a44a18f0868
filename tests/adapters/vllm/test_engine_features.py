"""Two real vLLM workers, everything that a request can ask for, and a session that is moved in the midst of it.

A move takes the KV out of the live pool of the one engine into the other's, which costs no start of an engine; what
kills do is in the other files. A client must not be able to tell a moved answer from an undisturbed one by any field.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest

from support.moved_features import Feature, Results, of, require_same, run_all
from support.vllm_features import FEATURES
from support.vllm_models import with_thinking_tokens
from support.vllm_rig import COMPACT, Rig, shallow_model

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(900)]

OPTIONS = (
    "--max-num-batched-tokens", "256", "--scheduling-policy", "priority", "--reasoning-parser", "qwen3",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *COMPACT,
)  # fmt: skip


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two workers of a model that can think and call tools."""
    model = with_thinking_tokens(shallow_model(), tmp_path_factory.mktemp("model") / "thinking")
    # Many cases share two cores: how long a copy takes is not what is tested here.
    rig = Rig(*OPTIONS, workers=2, settings={"restore.load_timeout_s": 60}, model=model)
    rig.sidecar.store = tmp_path_factory.mktemp("store")
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@pytest.fixture(scope="module")
def ran(rig: Rig) -> Results:
    """All cases, several at once; what went wrong in one is told by its own test."""
    return asyncio.run(run_all(rig.sidecar, FEATURES))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_nobody_can_tell_a_moved_answer_from_an_undisturbed_one(ran: Results, feature: Feature) -> None:
    require_same(ran, feature)


def test_the_cases_are_what_their_names_say(ran: Results) -> None:
    """A case in which nothing of what it is about ever happened would pass for nothing."""
    for feature in FEATURES:
        plain = of(ran, feature.name).plain
        if "JSON schema" in feature.name:
            assert set(json.loads(plain.text(".content"))) == {"name", "age", "tags"}, plain.values
        if "reasoning" in feature.name or "thinking" in feature.name:
            assert plain.text(".reasoning"), plain.values
        if "thinking" in feature.name:
            assert plain.text(".content"), plain.values
        if feature.name in ("tool call, named", "tool call, required", "unstreamed tool call"):
            assert "get_weather" in json.dumps(plain.values) or "get_time" in json.dumps(plain.values)
        if feature.name == "tool calls, two":
            names = [v for k, v in plain.values.items() if k.endswith(".function.name")]
            assert names == ["get_weather", "get_time"], plain.values
