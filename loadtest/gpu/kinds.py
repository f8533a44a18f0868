"""The engines that are measured: what is particular to each. Pure.

Owns their commands, options and variables, the name of the process that computes, and what a request may not ask of
one. SGLang on a GPU was not tested before it is measured, so its engines are told to be tried in spite of that.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import models
from .models import SERVED_AS

# What the documentation tells an operator to give to vLLM.
CONNECTOR = {
    "kv_connector": "MidstreamConnector",
    "kv_connector_module_path": "midstream.adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine. `beside` and `beside_environ` are for one with midstream; `core` is in the name of what computes.

    `serve` makes its command of a model's folder, `small` the options of one on which exactness is judged, `large`
    those of one whose KV has so many bytes. `exact_options` and `exact_environ` keep the company of other requests from
    changing an answer. `grammar` asks for an answer by a regular expression; `unasked` are fields that it refuses.
    """

    name: str
    core: str
    serve: Callable[..., list[str]]
    small: Callable[[], tuple[str, ...]]
    large: Callable[[int], tuple[str, ...]]
    grammar: Callable[[str], dict[str, Any]]
    inter_token_latency: str
    environ: Mapping[str, str]
    beside: tuple[str, ...] = ()
    beside_environ: Mapping[str, str] | None = None
    exact_options: tuple[str, ...] = ()
    exact_environ: Mapping[str, str] | None = None
    unasked: frozenset[str] = frozenset()


def sglang_command(model: Path, *options: str) -> list[str]:
    """SGLang's command, without a port."""
    return [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", SERVED_AS,
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--page-size", "64", *options,
    ]  # fmt: skip


def sglang_small() -> tuple[str, ...]:
    """The options of a small SGLang for exactness: 64 Ki positions, 1.5 GB of them."""
    return (
        "--context-length", "4096", "--max-running-requests", "64", "--max-total-tokens", str(64 << 10),
        "--mem-fraction-static", "0.3", "--cuda-graph-max-bs", "64", "--grammar-backend", "xgrammar",
    )  # fmt: skip


def sglang_large(kv_bytes: int) -> tuple[str, ...]:
    """The options of one of two SGLangs that share a card: each says how much KV it takes."""
    return (
        "--load-format", "dummy", "--context-length", "36864", "--max-running-requests", "128",
        "--max-total-tokens", str(kv_bytes // models.LARGE.token_bytes // 64 * 64), "--mem-fraction-static", "0.6",
        "--cuda-graph-max-bs", "64", "--enable-metrics",
    )  # fmt: skip


VLLM = EngineKind(
    name="vllm",
    core="EngineCore",
    serve=models.serve,
    small=models.small_options,
    large=models.large_options,
    grammar=lambda regex: {"structured_outputs": {"regex": regex}},
    inter_token_latency="vllm:inter_token_latency_seconds",
    environ={**_QUIET, "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"},
    beside=("--kv-transfer-config", json.dumps(CONNECTOR)),
    exact_environ={"VLLM_BATCH_INVARIANT": "1"},
)
SGLANG = EngineKind(
    name="sglang",
    core="sglang::schedul",
    serve=sglang_command,
    small=sglang_small,
    large=sglang_large,
    grammar=lambda regex: {"regex": regex},
    inter_token_latency="sglang:inter_token_latency_seconds",
    environ={**_QUIET, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    beside_environ={"SGLANG_MIDSTREAM_TRIED": "device"},
    exact_options=("--enable-deterministic-inference",),
    unasked=frozenset({"min_p"}),
)


def with_options(kind: EngineKind, options: Sequence[str]) -> EngineKind:
    """The same engine, told some more."""
    if not options:
        return kind
    return replace(
        kind, small=lambda: (*kind.small(), *options), large=lambda kv_bytes: (*kind.large(kv_bytes), *options)
    )


KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in (VLLM, SGLANG)}
