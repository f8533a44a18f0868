"""What an engine has that sessions were not seen to come through: with any of it, no KV of it is offered.

Owns the list of words in the arena's facts (`inexact`). An allow list at heart: attention, cache and topology must be
of the kinds that tests have run, and everything that keeps a state of its own beside KV and outputs must be off. What
adds nothing to a session's state (quantized weights, mixtures of experts) is not asked for. Reads configurations only.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from ...session.commits import RANKS_MAX
from .group import rank_count

TESTED_VERSIONS = ("0.25.1", "0.32.0")
# Of one group of layers; subclasses lay out, free or share their blocks otherwise.
ATTENTION = ("FullAttentionSpec",)
# Bytes that mean the same wherever they are read; others need scales that lie elsewhere.
KV_DTYPES = ("auto", "float16", "bfloat16", "float32", "half", "float")
SCHEDULERS = ("Scheduler", "AsyncScheduler")
CONNECTOR = "MidstreamConnector"


def obstacles(config: Any, kv_cache_config: Any, version: str) -> list[str]:
    """One word for each thing that was not seen to work, in the order of the rules."""
    return of_options(config, version) + _of_cache(kv_cache_config)


def of_options(config: Any, version: str) -> list[str]:
    """Those that are known before an engine has a cache, and in each of its processes alike."""
    found = [word for word, is_there in _RULES if is_there(config)]
    if version not in TESTED_VERSIONS:
        found.append("version")
    return found


def plain_version(vllm: Any) -> str:
    """The version of the engine's package, without what a build adds to it."""
    return str(getattr(vllm, "__version__", "unknown")).split("+")[0]


def _of_cache(kv_cache_config: Any) -> list[str]:
    groups: Sequence[Any] = getattr(kv_cache_config, "kv_cache_groups", ())
    if len(groups) != 1:
        return ["kv_groups"]
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ not in ATTENTION:
        return ["attention"]
    # Layers with windows are full attention for the cache when its manager was told not to tell them apart.
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        return ["sliding_window"]
    return ["attention"] if getattr(spec, "non_causal", False) else []


def _set(*path: str) -> Callable[[Any], bool]:
    """Whether an option is there and not empty; one that this version does not have is not used."""

    def is_set(config: Any) -> bool:
        value = config
        for name in path:
            value = getattr(value, name, None)
        return bool(value)

    return is_set


def _more_than_one(name: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config.parallel_config, name, 1) > 1


def _is_not_none(name: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config, name, None) is not None


def _named(thing: Any) -> str:
    """The last word of a class or of the path to one."""
    return thing.rsplit(".", 1)[-1] if isinstance(thing, str) else getattr(thing, "__name__", str(thing))


def _other_scheduler(config: Any) -> bool:
    chosen = getattr(config.scheduler_config, "scheduler_cls", None)
    return chosen is not None and _named(chosen) not in SCHEDULERS


def _other_connector(config: Any) -> bool:
    """One that wraps ours, or stands in its place."""
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer is None or transfer.kv_connector != CONNECTOR


def _foreign_logits(config: Any) -> bool:
    """Processors of others may remember what they saw, and nothing rebuilds that."""
    return bool(getattr(config.model_config, "logits_processors", None)) or bool(
        entry_points(group="vllm.logits_processors")
    )


def _ranks_without_an_arena(config: Any) -> bool:
    """More ranks than can say what they have done, or ranks elsewhere: each maps the arena of its engine's core."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size < 2:
        return False
    elsewhere = getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend != "mp"
    return elsewhere or rank_count(config) > RANKS_MAX


_RULES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("spec_decode", _is_not_none("speculative_config")),
    ("pipeline_parallel", _more_than_one("pipeline_parallel_size")),
    ("tensor_parallel", _ranks_without_an_arena),
    ("data_parallel", _more_than_one("data_parallel_size")),
    ("context_parallel", _more_than_one("decode_context_parallel_size")),
    ("context_parallel_prefill", _more_than_one("prefill_context_parallel_size")),
    ("expert_balancing", _set("parallel_config", "enable_eplb")),
    ("elastic_experts", _set("parallel_config", "enable_elastic_ep")),
    ("micro_batches", _set("parallel_config", "enable_dbo")),
    ("multimodal", _set("model_config", "is_multimodal_model")),
    ("multimodal_positions", _set("model_config", "uses_mrope")),
    ("encoder_decoder", _set("model_config", "is_encoder_decoder")),
    ("hybrid", _set("model_config", "is_hybrid")),
    ("inner_state", _set("model_config", "has_inner_state")),
    ("diffusion", _set("model_config", "is_diffusion")),
    ("pooling", lambda config: getattr(config.model_config, "runner_type", "generate") != "generate"),
    ("logits_processors", _foreign_logits),
    ("trace_replay", _set("model_config", "enable_trace_replay")),
    ("kv_quantization", lambda config: str(config.cache_config.cache_dtype) not in KV_DTYPES),
    ("kv_quantization_of_layers", _set("cache_config", "kv_cache_dtype_skip_layers")),
    ("kv_sharing", _set("cache_config", "kv_sharing_fast_prefill")),
    ("kv_offloading", _set("cache_config", "kv_offloading_size")),
    ("prefix_match_unit", _set("cache_config", "prefix_match_unit")),
    ("other_connector", _other_connector),
    ("encoder_transfer", _is_not_none("ec_transfer_config")),
    ("weight_transfer", _is_not_none("weight_transfer_config")),
    ("watermark", _is_not_none("watermark_config")),
    ("engram", _is_not_none("engram_config")),
    ("scheduler", _other_scheduler),
)
