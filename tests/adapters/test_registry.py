"""Commands are recognised, and what is not says what would be."""

import pytest

from midstream.adapters.registry import ADAPTERS, adapter_for, adapter_named
from midstream.session.errors import EngineError


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["vllm", "serve", "m"], "vllm"),
        (["/venv/bin/vllm", "serve", "m"], "vllm"),
        (["python", "/venv/bin/vllm", "serve", "m"], "vllm"),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm"),
        (["python", "-m", "sglang.launch_server", "--model-path", "m"], "sglang"),
        (["/venv/bin/sglang", "serve", "--model-path", "m"], "sglang"),
        (["python3", "-m", "midstream.adapters.transformers.server", "--model", "d"], "transformers"),
    ],
)
def test_a_command_is_recognised(argv: list[str], name: str) -> None:
    assert adapter_for(argv).name == name


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["serve"],
        ["serve", "vllm"],
        ["serve", "m", "vllm"],
        ["vllm", "bench", "m"],
        ["ollama", "serve"],
        ["python", "-m", "http.server"],
        ["python", "a.py", "b", "c", "vllm", "serve"],
    ],
)
def test_any_other_command_is_an_error_that_lists_what_is_known(argv: list[str]) -> None:
    with pytest.raises(EngineError, match=r"no engine that midstream knows how to start; use `vllm serve MODEL"):
        adapter_for(argv)


def test_adapters_are_found_by_the_names_that_plugins_publish() -> None:
    for name, adapter in ADAPTERS.items():
        assert adapter_named(name) is adapter
    with pytest.raises(EngineError, match="engine 'tgi' is unknown; known are sglang, transformers, vllm"):
        adapter_named("tgi")
