"""All engines that midstream knows. A new engine is one folder and one line here."""

from collections.abc import Sequence
from pathlib import Path

from ..session.errors import EngineError
from .contract import EngineAdapter
from .sglang.adapter import SglangAdapter
from .transformers.adapter import TransformersAdapter
from .vllm.adapter import VllmAdapter

ADAPTERS: dict[str, EngineAdapter] = {a.name: a for a in (VllmAdapter(), SglangAdapter(), TransformersAdapter())}


def adapter_for(argv: Sequence[str]) -> EngineAdapter:
    """The adapter of the engine that a command starts; EngineError lists what is known."""
    for adapter in ADAPTERS.values():
        if adapter.recognises(argv):
            return adapter
    known = (
        "`vllm serve MODEL ...`, `python -m sglang.launch_server --model-path MODEL ...` "
        "or `python -m midstream.adapters.transformers.server --model DIR ...`"
    )
    name = Path(argv[0]).name if argv else "nothing"
    raise EngineError(f"{name!r} is no engine that midstream knows how to start; use {known}")


def adapter_named(name: str) -> EngineAdapter:
    """The adapter by the name that a plugin publishes; EngineError lists what is known."""
    try:
        return ADAPTERS[name]
    except KeyError:
        raise EngineError(f"engine {name!r} is unknown; known are {', '.join(sorted(ADAPTERS))}") from None
