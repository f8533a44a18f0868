"""What an engine has that sessions were not seen to come through: with any of it, no KV of it is offered.

Owns the list of words in the arena's facts (`inexact`). An allow list at heart: attention, cache, pages and topology
must be of the kinds that tests have run, and everything that keeps a state of its own beside KV and outputs must be
off. Reads options only.
"""

import os
from collections.abc import Callable
from typing import Any

TESTED_VERSIONS = ("0.5.15",)
PAGE_SIZES = (16, 32, 64, 128)
# Bytes that mean the same wherever they are read; others need scales that lie elsewhere.
KV_DTYPES = ("auto", "float16", "bfloat16", "float32", "bf16")
DEVICES = ("cpu",)
# For whoever finds out whether it works: words, with commas between, that an engine is to be tried in spite of. Of
# these alone it is known why it should.
TRIED = "SGLANG_MIDSTREAM_TRIED"
_TRIABLE = ("device", "version")
_TOPK = "enable_return_indexer_topk"


def of_options(options: Any, version: str) -> list[str]:
    """One word for each thing that was not seen to work, in the order of the rules; `options` are the server's."""
    found = [word for word, is_there in _RULES if is_there(options)]
    if version not in TESTED_VERSIONS:
        found.append("version")
    tried = os.environ.get(TRIED, "").split(",")
    return [word for word in found if word not in _TRIABLE or word not in tried]


def of_model(scheduler: Any) -> list[str]:
    """Those that only the loaded model tells."""
    model = scheduler.model_config
    found = []
    if getattr(scheduler, "is_hybrid_swa", False) or getattr(model, "sliding_window_size", None):
        found.append("sliding_window")
    if getattr(scheduler, "is_hybrid_ssm", False):
        found.append("hybrid")
    if getattr(getattr(model, "attention_arch", None), "name", "") != "MHA":
        found.append("attention")
    if getattr(model, "is_multimodal", False):
        found.append("multimodal")
    if getattr(model, "is_encoder_decoder", False):
        found.append("encoder_decoder")
    if not getattr(model, "is_generation", False):
        found.append("pooling")
    return found


def _set(name: str) -> Callable[[Any], bool]:
    """Whether an option is there and not empty; one that this version does not have is not used."""
    return lambda options: bool(getattr(options, name, None))


def _any(*names: str) -> Callable[[Any], bool]:
    return lambda options: any(getattr(options, name, None) for name in names)


def _more_than_one(*names: str) -> Callable[[Any], bool]:
    return lambda options: any((getattr(options, name, 1) or 1) > 1 for name in names)


def _is_none_of(name: str, allowed: tuple[Any, ...]) -> Callable[[Any], bool]:
    return lambda options: getattr(options, name, None) not in allowed


_RULES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("spec_decode", _set("speculative_algorithm")),
    ("pipeline_parallel", _more_than_one("pp_size")),
    ("tensor_parallel", _more_than_one("tp_size")),
    ("data_parallel", _more_than_one("dp_size", "nnodes")),
    ("context_parallel", _more_than_one("dcp_size", "attn_cp_size")),
    ("expert_parallel", _more_than_one("ep_size")),
    ("disaggregation", _is_none_of("disaggregation_mode", ("null", None))),
    ("multiplexing", _set("enable_pdmux")),
    ("micro_batches", _set("enable_two_batch_overlap")),
    ("diffusion", _set("dllm_algorithm")),
    # Draws in a way of its own where no request of a batch limits its choice.
    ("on_policy", _set("rl_on_policy_target")),
    ("lora", lambda options: bool(options.enable_lora or options.lora_paths)),
    ("logits_processors", _set("enable_custom_logit_processor")),
    ("kv_quantization", _is_none_of("kv_cache_dtype", KV_DTYPES)),
    ("kv_offloading", lambda o: bool(o.enable_hierarchical_cache or getattr(o, "enable_hisparse", False))),
    ("kv_layout", lambda o: bool(getattr(o, "enable_unified_memory", False) or o.enable_memory_saver)),
    # Of tokens that are replayed there are none.
    (
        "hidden_states",
        _any("enable_return_hidden_states", "enable_return_routed_experts", "enable_return_indexer_topk"),
    ),
    ("engine_sessions", lambda o: bool(getattr(o, "enable_session_radix_cache", False))),
    ("priorities", _set("enable_priority_scheduling")),
    ("page_size", _is_none_of("page_size", PAGE_SIZES)),
    ("device", _is_none_of("device", DEVICES)),
    ("front_ends", _more_than_one("tokenizer_worker_num")),
    ("no_tokenizer", _set("skip_tokenizer_init")),
)
