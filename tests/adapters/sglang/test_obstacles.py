"""What sessions were not seen to come through has its word, and only that."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.sglang.obstacles import TRIED, of_model, of_options
from support.sglang_inside import run_inside

SERVED: dict[str, Any] = {
    "enable_lora": None,
    "lora_paths": None,
    "enable_hierarchical_cache": False,
    "enable_memory_saver": False,
    "disaggregation_mode": "null",
    "kv_cache_dtype": "auto",
    "page_size": 64,
    "device": "cpu",
}
OPTIONS = {
    "spec_decode": {"speculative_algorithm": "EAGLE"},
    "pipeline_parallel": {"pp_size": 2},
    "tensor_parallel": {"tp_size": 2},
    "data_parallel": {"dp_size": 2},
    "context_parallel": {"dcp_size": 2},
    "expert_parallel": {"ep_size": 2},
    "disaggregation": {"disaggregation_mode": "decode"},
    "multiplexing": {"enable_pdmux": True},
    "micro_batches": {"enable_two_batch_overlap": True},
    "diffusion": {"dllm_algorithm": "x"},
    "on_policy": {"rl_on_policy_target": "fsdp"},
    "lora": {"enable_lora": True},
    "logits_processors": {"enable_custom_logit_processor": True},
    "kv_quantization": {"kv_cache_dtype": "fp8_e4m3"},
    "kv_offloading": {"enable_hierarchical_cache": True},
    "kv_layout": {"enable_memory_saver": True},
    "hidden_states": {"enable_return_hidden_states": True},
    "engine_sessions": {"enable_session_radix_cache": True},
    "priorities": {"enable_priority_scheduling": True},
    "page_size": {"page_size": 1},
    "device": {"device": "cuda"},
    "front_ends": {"tokenizer_worker_num": 2},
    "no_tokenizer": {"skip_tokenizer_init": True},
}
MODELS = {
    "sliding_window": {"is_hybrid_swa": True},
    "hybrid": {"is_hybrid_ssm": True},
    "attention": {"attention_arch": SimpleNamespace(name="MLA")},
    "multimodal": {"is_multimodal": True},
    "encoder_decoder": {"is_encoder_decoder": True},
    "pooling": {"is_generation": False},
}


def of_server(**more: Any) -> list[str]:
    return of_options(SimpleNamespace(**{**SERVED, **more}), "0.5.15")


def of_loaded(**more: Any) -> list[str]:
    model = {"attention_arch": SimpleNamespace(name="MHA"), "is_generation": True, **more}
    return of_model(SimpleNamespace(model_config=SimpleNamespace(**model), **more))


@pytest.mark.parametrize("word", OPTIONS)
def test_each_has_its_word(word: str) -> None:
    assert of_server() == []
    assert of_server(**OPTIONS[word]) == [word]


@pytest.mark.parametrize("word", MODELS)
def test_models_that_were_not_tested_have_theirs(word: str) -> None:
    assert of_loaded() == []
    assert of_loaded(**MODELS[word]) == [word]


def test_a_version_that_was_not_tested_is_one() -> None:
    assert of_options(SimpleNamespace(**SERVED), "0.5.16") == ["version"]


def test_what_only_was_not_tested_is_tried_where_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIED, "device,micro_batches")
    assert of_server(device="cuda") == []
    # It is known why the others are in the way.
    assert of_server(device="cuda", enable_two_batch_overlap=True) == ["micro_batches"]
    assert of_options(SimpleNamespace(**SERVED), "0.5.16") == ["version"]
    monkeypatch.setenv(TRIED, "version")
    assert of_options(SimpleNamespace(**SERVED), "0.5.16") == []


OPTIONS_ARE_THERE = """
from sglang.srt.server_args import ServerArgs
from midstream.adapters.sglang import identity, obstacles

class Asked:
    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)
        return None

asked = Asked()
obstacles.of_options(asked, "0.5.15")
known = set(ServerArgs.__dataclass_fields__)
assert len(asked.names) > 20, asked.names
assert not asked.names - known, asked.names - known
assert not set(identity._OPTIONS) - known, set(identity._OPTIONS) - known
"""


def test_every_option_that_is_looked_at_is_one_of_sglang(tmp_path: Any) -> None:
    """A name that it has not would be found unset for ever."""
    run_inside(OPTIONS_ARE_THERE, tmp_path)


WITHOUT_A_HOOK = """
from sglang.srt.sampling import sampling_batch_info
from midstream.adapters import guard
from midstream.adapters.sglang import identity, marking, scheduler_hooks

marking.draw_field()
scheduler_hooks.install()
assert identity._of_hooks() == []
guard.missing.append("Scheduler.abort_request")
assert identity._of_hooks() == ["hooks"]
guard.missing.clear()
sampling_batch_info.SamplingBatchInfo.from_schedule_batch = classmethod(lambda cls, batch, vocab_size: None)
assert identity._of_hooks() == ["hooks"], "penalizers that are not known"
"""


def test_what_cannot_be_hooked_has_its_word(tmp_path: Any) -> None:
    run_inside(WITHOUT_A_HOOK, tmp_path)
