"""What a session cannot be carried through is told by one word, and everything that is not known counts as that."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import obstacles as module
from midstream.adapters.vllm.obstacles import obstacles, plain_version

VERSION = "0.32.0"


def config(**changes: Any) -> SimpleNamespace:
    """A plain engine as tests run it; `changes` by dotted names with `__`."""
    plain = SimpleNamespace(
        model_config=SimpleNamespace(
            is_multimodal_model=False, uses_mrope=False, is_encoder_decoder=False, is_hybrid=False,
            has_inner_state=False, is_diffusion=False, runner_type="generate", logits_processors=None,
            enable_trace_replay=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, enable_eplb=False, enable_elastic_ep=False, enable_dbo=False,
            distributed_executor_backend="mp", nnodes=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False, kv_offloading_size=None,
            prefix_match_unit=None,
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        kv_transfer_config=SimpleNamespace(kv_connector="MidstreamConnector"),
        speculative_config=None, ec_transfer_config=None, weight_transfer_config=None, watermark_config=None,
        engram_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        *path, last = name.split("__")
        at: Any = plain
        for part in path:
            at = getattr(at, part)
        setattr(at, last, value)
    return plain


class FullAttentionSpec:
    """A group of layers as the plain one of vLLM describes itself."""

    def __init__(self, **fields: Any) -> None:
        self.sliding_window: int | None = None
        self.attention_chunk_size: int | None = None
        self.non_causal = False
        self.__dict__.update(fields)


class MLAAttentionSpec(FullAttentionSpec):
    """A subclass: laid out otherwise."""


class SlidingWindowSpec:
    """A group whose blocks are given back while the session runs."""


def cache(*specs: Any) -> SimpleNamespace:
    """What vLLM decided about its cache."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


PLAIN = cache(FullAttentionSpec())


def test_a_plain_engine_has_none() -> None:
    assert obstacles(config(), PLAIN, VERSION) == []
    # What an older version does not know it does not have.
    older = config()
    del older.watermark_config, older.engram_config, older.weight_transfer_config, older.cache_config.prefix_match_unit
    assert obstacles(older, PLAIN, "0.25.1") == []


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("speculative_config", object(), "spec_decode"),
        ("parallel_config__pipeline_parallel_size", 2, "pipeline_parallel"),
        ("parallel_config__tensor_parallel_size", 64, "tensor_parallel"),
        ("parallel_config__data_parallel_size", 2, "data_parallel"),
        ("parallel_config__decode_context_parallel_size", 2, "context_parallel"),
        ("parallel_config__prefill_context_parallel_size", 2, "context_parallel_prefill"),
        ("parallel_config__enable_eplb", True, "expert_balancing"),
        ("parallel_config__enable_elastic_ep", True, "elastic_experts"),
        ("parallel_config__enable_dbo", True, "micro_batches"),
        ("model_config__is_multimodal_model", True, "multimodal"),
        ("model_config__uses_mrope", True, "multimodal_positions"),
        ("model_config__is_encoder_decoder", True, "encoder_decoder"),
        ("model_config__is_hybrid", True, "hybrid"),
        ("model_config__has_inner_state", True, "inner_state"),
        ("model_config__is_diffusion", True, "diffusion"),
        ("model_config__runner_type", "pooling", "pooling"),
        ("model_config__logits_processors", ["mine:Processor"], "logits_processors"),
        ("model_config__enable_trace_replay", True, "trace_replay"),
        ("cache_config__cache_dtype", "fp8_e4m3", "kv_quantization"),
        ("cache_config__cache_dtype", "a_new_one", "kv_quantization"),
        ("cache_config__kv_cache_dtype_skip_layers", ["0"], "kv_quantization_of_layers"),
        ("cache_config__kv_sharing_fast_prefill", True, "kv_sharing"),
        ("cache_config__kv_offloading_size", 4.0, "kv_offloading"),
        ("cache_config__prefix_match_unit", 16, "prefix_match_unit"),
        ("kv_transfer_config__kv_connector", "MultiConnector", "other_connector"),
        ("kv_transfer_config", None, "other_connector"),
        ("ec_transfer_config", object(), "encoder_transfer"),
        ("weight_transfer_config", object(), "weight_transfer"),
        ("watermark_config", object(), "watermark"),
        ("engram_config", object(), "engram"),
        ("scheduler_config__scheduler_cls", "mine.sched.MyScheduler", "scheduler"),
    ],
)
def test_each_has_its_word(name: str, value: object, word: str) -> None:
    assert obstacles(config(**{name: value}), PLAIN, VERSION) == [word]


def test_ranks_that_have_the_arena_of_their_engine_are_none_and_others_are() -> None:
    assert obstacles(config(parallel_config__tensor_parallel_size=2), PLAIN, VERSION) == []
    for name, value in (("nnodes", 2), ("distributed_executor_backend", "ray")):
        elsewhere = {"parallel_config__tensor_parallel_size": 2, f"parallel_config__{name}": value}
        assert obstacles(config(**elsewhere), PLAIN, VERSION) == ["tensor_parallel"]
        # A worker that is alone is where its engine is.
        assert obstacles(config(**{f"parallel_config__{name}": value}), PLAIN, VERSION) == []


def test_vllm_s_own_schedulers_are_none() -> None:
    class AsyncScheduler:
        pass

    for chosen in ("vllm.v1.core.sched.scheduler.Scheduler", AsyncScheduler):
        assert obstacles(config(scheduler_config__scheduler_cls=chosen), PLAIN, VERSION) == []


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        ((), "kv_groups"),
        ((FullAttentionSpec(), FullAttentionSpec()), "kv_groups"),
        ((MLAAttentionSpec(),), "attention"),
        ((SlidingWindowSpec(),), "attention"),
        ((FullAttentionSpec(sliding_window=4096),), "sliding_window"),
        ((FullAttentionSpec(attention_chunk_size=8192),), "sliding_window"),
        ((FullAttentionSpec(non_causal=True),), "attention"),
    ],
)
def test_kv_of_another_kind_has_its_word(specs: tuple[Any, ...], word: str) -> None:
    assert obstacles(config(), cache(*specs), VERSION) == [word]


def test_a_version_that_was_not_tested_is_one() -> None:
    assert obstacles(config(), PLAIN, "0.33.0") == ["version"]
    assert plain_version(SimpleNamespace(__version__="0.32.0+cpu")) == VERSION
    assert plain_version(SimpleNamespace()) == "unknown"


def test_processors_that_packages_bring_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: [group])
    assert obstacles(config(), PLAIN, VERSION) == ["logits_processors"]
