"""What an engine says of itself: no KV where there is an obstacle, and settings that are the same in each process."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.vllm import identity
from midstream.session.errors import PoolError
from midstream.session.key import CompatibilityKey

ADOPT = Path("/s/1.arena")
SETTINGS = PluginSettings("w0", 2, Path("/s/holder.sock"), Path("/s/2.arena"), ADOPT, 10.0)


class Holder:
    """What the holder tells of each pool that a rank has announced."""

    def __init__(self, adopted_from: dict[str, str | None], silent: Sequence[str]) -> None:
        self._adopted_from = adopted_from
        self._silent = silent

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._adopted_from:
            raise PoolError(f"pool {name} is not held")
        owner = {"pid": 7, "fd": 3, "adopted_from": self._adopted_from[name], "commits": name not in self._silent}
        return os.open(os.devnull, os.O_RDONLY), {"owner": owner, "fingerprint": "f" * 32}


Engine = Callable[..., tuple[dict[str, Any], bool]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Facts of an engine with these obstacles, of whose ranks these have announced pools."""

    def facts(
        inexact: Sequence[str],
        pools: dict[str, str | None],
        ranks: int = 1,
        adopt: Path | None = ADOPT,
        silent: Sequence[str] = (),
    ) -> tuple[dict[str, Any], bool]:
        monkeypatch.setattr(identity, "_key", lambda config: {"model": "m"})
        monkeypatch.setattr(identity, "_inexact", lambda config, cache: list(inexact))
        monkeypatch.setattr(identity, "HolderClient", lambda path: Holder(pools, silent))
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1, _api_process_count=3),
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        return identity.facts_of(replace(SETTINGS, adopt=adopt), config, None)

    return facts


def test_an_engine_without_obstacles_offers_its_pools(engine: Engine) -> None:
    facts, adopted = engine([], {"w0/2/0": "w0/1/0"})
    assert (facts["pools"], facts["adopted"], facts["inexact"], adopted) == (["w0/2/0"], True, [], True)
    assert facts["key"]["kv_layout"] == "f" * 32
    assert facts["front_ends"] == 3
    facts, adopted = engine([], {"w0/2/0": None})
    assert (facts["pools"], facts["adopted"], adopted) == (["w0/2/0"], False, False)


def test_pools_whose_bytes_mean_something_else_have_another_key(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(self: Holder, name: str) -> tuple[int, dict[str, Any]]:
        owner = {"pid": 7, "fd": 3, "adopted_from": None, "meaning": "a1"}
        return os.open(os.devnull, os.O_RDONLY), {"owner": owner, "fingerprint": "f" * 32}

    monkeypatch.setattr(Holder, "get", get)
    facts, _ = engine([], {})
    assert facts["key"]["kv_layout"] == "f" * 32 + "/a1"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The configuration of an engine on a GPU, whose driver says its version."""
    (tmp_path / "version").write_text("580.159\n")
    monkeypatch.setattr(identity, "_DRIVER", tmp_path / "version")
    platforms = SimpleNamespace(current_platform=SimpleNamespace(get_device_name=lambda: "NVIDIA H200"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.25.1"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(__version__="2.11.0+cu130", version=SimpleNamespace(cuda="13.0"))
    )
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(model="m", tokenizer="t", dtype="bf16", quantization=None, enforce_eager=False),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(mode=3, cudagraph_mode="FULL_AND_PIECEWISE"),
        lora_config=None,
        use_v2_model_runner=True,
    )


def test_the_key_of_an_engine_on_a_gpu_names_card_driver_runtime_and_versions(on_a_gpu: Any) -> None:
    key = CompatibilityKey.from_json({**identity._key(on_a_gpu), "kv_layout": "f" * 32}).fields
    told = {name: key[name] for name in ("device", "driver", "cuda_runtime", "engine_version", "torch_version")}
    assert told == {
        "device": "NVIDIA H200",
        "driver": "580.159",
        "cuda_runtime": "13.0",
        "engine_version": "0.25.1",
        "torch_version": "2.11.0+cu130",
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("driver", lambda config, patch: identity._DRIVER.write_text("580.95")),
        ("cuda_runtime", lambda config, patch: patch.setattr(sys.modules["torch"].version, "cuda", "12.9")),
        ("model_runner", lambda config, patch: patch.setattr(config, "use_v2_model_runner", False)),
        ("batch_invariant", lambda config, patch: patch.setenv("VLLM_BATCH_INVARIANT", "1")),
        ("cuda_graphs", lambda config, patch: patch.setattr(config.compilation_config, "cudagraph_mode", "NONE")),
    ],
)
def test_whatever_changes_numbers_on_a_gpu_makes_another_key(
    on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any, Any], Any]
) -> None:
    before = identity._key(on_a_gpu)
    change(on_a_gpu, monkeypatch)
    after = identity._key(on_a_gpu)
    assert [key for key in after if after[key] != before[key]] == [name]


def test_a_driver_that_tells_nobody_its_version_is_an_unknown_one(
    on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_DRIVER", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "vllm.third_party", SimpleNamespace(pynvml=None))
    assert identity._key(on_a_gpu)["driver"] == "unknown"
    told = SimpleNamespace(
        nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.159", nvmlShutdown=lambda: None
    )
    monkeypatch.setitem(sys.modules, "vllm.third_party", SimpleNamespace(pynvml=told))
    assert identity._key(on_a_gpu)["driver"] == "580.159"


def test_an_engine_with_one_says_which_and_offers_none(engine: Engine) -> None:
    facts, _ = engine(["spec_decode"], {"w0/2/0": None})
    assert (facts["pools"], facts["adopted"], facts["inexact"]) == ([], False, ["spec_decode"])
    # Its text can still be continued elsewhere, so who it is stays known; no KV can.
    assert facts["key"] == {"model": "m", "kv_layout": "unplaced"}


def test_an_engine_with_an_obstacle_that_runs_in_the_old_pool_says_so_and_keeps_its_blocks(engine: Engine) -> None:
    facts, adopted = engine(["spec_decode"], {"w0/2/0": "w0/1/0"})
    assert (facts["pools"], facts["adopted"], adopted) == ([], True, True)


def test_a_rank_whose_pool_is_not_known_may_run_in_the_old_one(engine: Engine) -> None:
    facts, adopted = engine([], {})
    assert (facts["pools"], facts["adopted"], adopted) == ([], True, True)
    assert facts["key"]["kv_layout"] == "unplaced"
    # Where none was offered, none was adopted.
    facts, adopted = engine([], {}, adopt=None)
    assert (facts["pools"], facts["adopted"], adopted) == ([], False, False)


def test_where_only_some_ranks_run_in_the_old_pools_there_are_none_to_come_back_to(engine: Engine) -> None:
    facts, adopted = engine([], {"w0/2/0": "w0/1/0", "w0/2/1": None}, ranks=2)
    assert (facts["pools"], facts["adopted"], adopted) == ([], True, True)
    # The processes that have them mapped are told all the same.
    assert 7 in [pid for pid, _ in facts["processes"]]


def test_an_engine_with_ranks_offers_a_pool_of_each_if_all_can_say_what_they_have_done(engine: Engine) -> None:
    pools: dict[str, str | None] = {"w0/2/0": None, "w0/2/1": None}
    facts, _ = engine([], pools, ranks=2)
    assert facts["pools"] == ["w0/2/0", "w0/2/1"]
    facts, adopted = engine([], pools, ranks=2, silent=["w0/2/1"])
    assert (facts["pools"], facts["adopted"], adopted) == ([], False, False)
    assert facts["key"]["kv_layout"] == "unplaced"
    # What it runs in is told all the same: somebody else's KV may lie there.
    facts, adopted = engine([], {"w0/2/0": "w0/1/0", "w0/2/1": "w0/1/1"}, ranks=2, silent=["w0/2/0"])
    assert (facts["pools"], facts["adopted"], adopted) == ([], True, True)
    # With one rank there is nobody to agree with.
    facts, _ = engine([], {"w0/2/0": None}, silent=["w0/2/0"])
    assert facts["pools"] == ["w0/2/0"]


@pytest.mark.parametrize(
    ("options", "hooks", "draws", "may"),
    [
        ([], [], True, True),
        (["spec_decode"], [], True, False),
        ([], ["Scheduler.update_from_output"], True, False),
        ([], [], False, False),
    ],
)
def test_only_an_engine_without_obstacles_adopts(
    monkeypatch: pytest.MonkeyPatch, options: list[str], hooks: list[str], draws: bool, may: bool
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(identity, "of_options", lambda config, version: options)
    monkeypatch.setattr(identity, "missing", hooks)
    monkeypatch.setattr(identity, "draws_are_known", lambda config: draws)
    assert identity.may_adopt(None) == may


@pytest.mark.parametrize(
    ("hooks", "draws", "words"),
    [
        pytest.param([], True, [], id="nothing"),
        pytest.param(["Scheduler.update_from_output"], True, ["hooks"], id="hooks"),
        pytest.param([], False, ["random_state"], id="random_state"),
    ],
)
def test_what_cannot_be_hooked_or_rebuilt_has_its_word(
    monkeypatch: pytest.MonkeyPatch, hooks: list[str], draws: bool, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(identity, "obstacles", lambda config, cache, version: ["scheduler"])
    monkeypatch.setattr(identity, "missing", hooks)
    monkeypatch.setattr(identity, "draws_are_known", lambda config: draws)
    assert identity._inexact(None, None) == ["scheduler", *words]


def a_function_of_the_operator() -> None:
    """A setting may be one."""


def test_settings_are_plain_values_that_no_process_says_otherwise() -> None:
    assert [identity._plain(value) for value in (None, 7, True, "auto")] == [None, 7, True, "auto"]
    assert identity._plain({"rope_theta": 1e6}) == "{'rope_theta': 1000000.0}"
    assert identity._plain(a_function_of_the_operator) == "a_function_of_the_operator"
