"""Which memory an engine runs in, and how its buffers come to lie there.

The old engine's only where nothing keeps it from taking care of what lies there.
"""

import ctypes
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters import guard, held_pool
from midstream.adapters import vllm as package
from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.pool_host import HostMemory
from midstream.adapters.pool_layout import meaning_of
from midstream.adapters.vllm import pool, warm_up
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.errors import PoolError
from midstream.session.held import create_host_pool, map_pool
from midstream.session.layout import HOST, Plane, PoolLayout, PoolMeta, cuda_memory
from support.views import View

SIZE = 4096
SHAPE = "s" * 32
GPU = "GPU-7a0c8b8f-1d3e-4f6a-9b2c-0123456789ab"
CPU = SimpleNamespace(type="cpu", index=None)
BLOCKS = 4
MEANING = meaning_of({"l0": View((BLOCKS, SIZE // BLOCKS))}, BLOCKS)
announced: dict[str, Any] = {}


class Buffer:
    """A tensor of bytes over a mapping."""

    def __init__(self, mapping: Any, offset: int, size: int) -> None:
        self.mapping, self.offset, self.size = mapping, offset, size
        self.memory = memoryview(mapping)[offset : offset + size]

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapping)) + self.offset


# What of torch the placement uses.
TORCH = SimpleNamespace(
    int8="int8",
    int32="int32",
    frombuffer=lambda mapping, dtype, count, offset: Buffer(mapping, offset, count),
    zeros=lambda *size, **options: "torch's own",
)
GONE = {"processes": [[2**22, 1]]}  # above the kernel's greatest pid


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The pool of an engine that is gone, offered to one that starts; its name."""
    arenas = [tmp_path / "1.arena", tmp_path / "2.arena"]
    for path in arenas:
        create_arena(path, slot_count=2, page_count=4)
    old = ArenaWriter.open(arenas[0])
    old.publish({**GONE, "pools": ["w0/1/0"]})
    old.close()
    layout = PoolLayout(BLOCKS, 16, (Plane(0, SIZE // BLOCKS, SIZE // BLOCKS),))
    owner = {"pid": 1, "fd": 3, "shape": SHAPE, "meaning": MEANING}
    meta = PoolMeta(SIZE, layout, layout.fingerprint(), owner).to_json()
    held = create_host_pool(SIZE)
    with map_pool(held, SIZE) as memory:
        memory[:6] = b"the KV"

    class Holder:
        def __init__(self, path: Path) -> None:
            pass

        def get(self, name: str) -> tuple[int, dict[str, Any]]:
            assert name == "w0/1/0"
            return os.dup(held), meta

        def put(self, name: str, fd: int, told: dict[str, Any]) -> None:
            announced[name] = told

    settings = PluginSettings("w0", 2, tmp_path / "holder.sock", arenas[1], arenas[0], 10.0)
    monkeypatch.setattr(pool, "plugin_settings", lambda: settings)
    monkeypatch.setattr(held_pool, "HolderClient", Holder)
    monkeypatch.setattr(pool, "HolderClient", Holder)
    monkeypatch.setattr(pool, "rank_of_worker", lambda: 0)
    monkeypatch.setattr(pool, "_placed", None)
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    announced.clear()
    return "w0/1/0"


def place(shape: str = SHAPE, *, adopting: bool = True, v2: bool = False, size_bytes: int = SIZE) -> pool.PlacedPool:
    return pool._place(pool.Wanted(size_bytes, size_bytes, shape), CPU, adopting=adopting, v2=v2)


def adopted_from(found: pool.PlacedPool) -> str | None:
    return None if found.adopted is None else found.adopted.name


def test_an_engine_that_may_adopt_runs_in_the_old_pool_and_finds_what_lies_there(offered: str) -> None:
    found = place()
    assert adopted_from(found) == offered
    assert bytes(found.memory.tensor(0, 6).memory) == b"the KV"


def test_an_engine_that_may_not_gets_a_pool_of_its_own(offered: str) -> None:
    assert adopted_from(place(adopting=False)) is None


def test_a_pool_of_another_shape_or_too_small_is_not_adopted(offered: str) -> None:
    assert adopted_from(place("t" * 32)) is None
    assert adopted_from(place(size_bytes=SIZE + 1)) is None


@pytest.mark.parametrize("kept_off", [True, False])
def test_a_worker_that_would_write_to_the_old_blocks_while_it_warms_up_adopts_none(
    offered: str, monkeypatch: pytest.MonkeyPatch, kept_off: bool
) -> None:
    monkeypatch.setattr(warm_up, "keep_off", lambda: kept_off)
    assert adopted_from(place(v2=True)) == (offered if kept_off else None)


def test_a_pool_on_a_gpu_is_not_adopted_by_an_engine_on_a_cpu() -> None:
    layout = PoolLayout(BLOCKS, 16, (Plane(0, SIZE // BLOCKS, SIZE // BLOCKS),))
    meta = PoolMeta(SIZE, layout, layout.fingerprint(), {}, cuda_memory(GPU), "0" * 32)
    with pytest.raises(PoolError, match="runs on a CPU"):
        HostMemory.adopt(3, meta, CPU)


# ---- laying buffers into it


def config(*tensors: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(num_blocks=2, kv_cache_tensors=list(tensors), kv_cache_groups=["one"])


def tensor(size: int, block_stride: int = 0) -> SimpleNamespace:
    return SimpleNamespace(size=size, block_stride=block_stride)


def test_each_tensor_has_its_place_and_those_that_are_packed_share_one() -> None:
    apart = pool.Wanted.by(config(tensor(100), tensor(4096), tensor(4097)), ())
    assert (apart.kv_bytes, apart.size_bytes) == (8293, 4096 + 4096 + 8192)
    packed = pool.Wanted.by(config(tensor(9000, 64), tensor(9000, 64)), ())
    assert (packed.kv_bytes, packed.size_bytes) == (9000, 12288)


def engine(allocate: str) -> types.ModuleType:
    """A module of the engine, with a function that allocates as this source does."""
    module = types.ModuleType("the_engine")
    module.torch = TORCH  # type: ignore[attr-defined]
    exec(allocate, vars(module))
    return module


TWO_LAYERS = """
def allocate_kv_cache(kv_cache_config, device, layout):
    layers = [torch.zeros(t.size, dtype=torch.int8, device=device) for t in kv_cache_config.kv_cache_tensors]
    return layers, torch.zeros(8, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int8)
"""


@pytest.fixture
def hooked(offered: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's allocation, hooked as that of an engine which may not adopt."""
    module = engine(TWO_LAYERS)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return pool._Placing(adopting=False, v2=False).by_device(module.allocate_kv_cache)


def test_all_buffers_of_the_cache_lie_in_one_pool_and_nothing_else_does(hooked: Any) -> None:
    (first, second), ids, small = hooked(config(tensor(5000), tensor(300)), CPU, "NHD")
    found = pool.placed()
    assert found is not None
    assert (first.offset, first.size, second.offset, second.size) == (0, 5000, 8192, 300)
    assert first.mapping is second.mapping is found.memory.mapping  # type: ignore[attr-defined]
    assert found.memory.size_bytes == 12288
    assert ids == small == "torch's own"
    # The module is the engine's own again.
    assert sys.modules["the_engine"].torch is TORCH


def test_a_second_cache_and_one_on_an_unknown_device_are_the_engines_own(hooked: Any) -> None:
    (own, _), *_ = hooked(config(tensor(1), tensor(1)), SimpleNamespace(type="xpu", index=None), "NHD")
    assert own == "torch's own"
    assert pool.placed() is None
    hooked(config(tensor(1), tensor(1)), CPU, "NHD")
    assert hooked(config(tensor(1), tensor(1)), CPU, "NHD")[0][0] == "torch's own"


def test_an_engine_without_kv_gets_no_pool(hooked: Any) -> None:
    hooked(config(), CPU, "NHD")
    assert pool.placed() is None


def test_where_no_pool_can_be_had_the_engine_allocates_as_ever_and_it_is_counted(
    hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise PoolError("no memory")

    monkeypatch.setattr(pool, "_place", refuse)
    monkeypatch.setattr(pool, "report", reported.append)
    assert hooked(config(tensor(1), tensor(1)), CPU, "NHD")[0] == ["torch's own"] * 2
    assert (reported, pool.placed()) == (["placement of the KV pool"], None)


def test_an_engine_that_allocates_in_another_way_is_left_alone(offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(pool, "report", reported.append)
    placing = pool._Placing(adopting=False, v2=False)
    without_torch = engine(TWO_LAYERS.replace("torch.zeros", "zeros").replace("torch.", ""))
    vars(without_torch).update(zeros=TORCH.zeros, int8=TORCH.int8, int32=TORCH.int32)
    del without_torch.torch
    monkeypatch.setitem(sys.modules, without_torch.__name__, without_torch)
    assert placing.by_device(without_torch.allocate_kv_cache)(config(tensor(1)), CPU, "NHD")[0] == ["torch's own"]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", None)
    assert placing.by_runner(lambda runner, config: "its own")(object(), config(tensor(1))) == "its own"
    assert placing.by_layers(lambda config, layers, device: "its own")(config(tensor(1)), {}, None) == "its own"
    assert (reported, pool.placed()) == (["placement of the KV pool"] * 3, None)


def test_a_tensor_that_cannot_be_had_in_the_pool_is_the_engines_own(
    hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []

    def refuse(*_: Any) -> None:
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(pool, "report", reported.append)
    monkeypatch.setattr(HostMemory, "tensor", refuse)
    assert hooked(config(tensor(1), tensor(1)), CPU, "NHD")[0] == ["torch's own"] * 2
    assert reported == ["a tensor in the KV pool"] * 2


def test_a_layer_beyond_the_pool_is_the_engines_own_and_such_a_pool_is_not_announced(
    hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool.Wanted, "by", lambda config, words: pool.Wanted(4096, 4096, SHAPE))
    (inside, outside), *_ = hooked(config(tensor(4096), tensor(4096)), CPU, "NHD")
    assert (inside.offset, outside) == (0, "torch's own")
    base = inside.data_ptr()
    for address in (base - 4096, base + 4096):
        views = {"l0": View((BLOCKS, 1024), base), "l1": View((BLOCKS, 1024), address)}
        with pytest.raises(PoolError):
            pool.announce(views, BLOCKS, 16)
    assert announced == {}


def test_what_another_run_must_share_to_find_its_kv_here_includes_the_order_of_dimensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = config(tensor(1))
    assert pool.Wanted.by(cache, ({}, "NHD")) == pool.Wanted.by(config(tensor(1)), ({}, "NHD"))
    assert len({pool.Wanted.by(cache, ({}, word)).shape for word in ("NHD", "HND")}) == 2


# ---- which function that is


def with_allocating(**functions: Any) -> types.ModuleType:
    module = types.ModuleType("vllm's")
    vars(module).update(functions)
    return module


def allocate_032(kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> None:
    """As 0.32 has it, for both runners."""


def allocate_025_v2(kv_cache_config: Any, shared_layers: Any, device: Any) -> None:
    """As the V2 runner of 0.25 has it."""


class RunnerOf025:
    """The V1 runner of 0.25."""

    def _allocate_kv_cache_tensors(self, kv_cache_config: Any) -> None:
        """Its own allocation."""


@pytest.mark.parametrize(
    ("v2", "module", "name"),
    [
        pytest.param(True, {"allocate_kv_cache": allocate_032}, "allocate_kv_cache", id="0.32, V2"),
        pytest.param(False, {"allocate_kv_cache": allocate_032}, "allocate_kv_cache", id="0.32, V1"),
        pytest.param(True, {"_allocate_kv_cache": allocate_025_v2}, "_allocate_kv_cache", id="0.25, V2"),
    ],
)
def test_of_each_version_and_runner_the_allocating_function_is_hooked(
    monkeypatch: pytest.MonkeyPatch, v2: bool, module: dict[str, Any], name: str
) -> None:
    found = with_allocating(**module)
    runner = "vllm.v1.worker.gpu" if v2 else "vllm.v1.worker"
    monkeypatch.setitem(sys.modules, runner, SimpleNamespace(**{"attn_utils" if v2 else "gpu_model_runner": found}))
    monkeypatch.setattr(pool, "_installed", False)
    monkeypatch.setattr(guard, "missing", [])
    pool.install(adopting=False, v2=v2)
    assert getattr(found, name).__wrapped__ is module[name]
    pool.install(adopting=False, v2=v2)
    assert getattr(found, name).__wrapped__ is module[name]
    assert guard.missing == []


def test_the_v1_runner_of_025_is_hooked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = type("GPUModelRunner", (), dict(vars(RunnerOf025)))
    found = with_allocating(GPUModelRunner=runner)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", SimpleNamespace(gpu_model_runner=found))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", found)
    monkeypatch.setattr(pool, "_installed", False)
    monkeypatch.setattr(guard, "missing", [])
    pool.install(adopting=False, v2=False)
    assert hasattr(runner._allocate_kv_cache_tensors, "__wrapped__")  # type: ignore[attr-defined]
    assert guard.missing == []


V2_OF_025 = """
def _allocate_kv_cache(kv_cache_config, shared_layers, device):
    return {t.name: torch.zeros(t.size, dtype=torch.int8, device=device) for t in kv_cache_config.kv_cache_tensors}
"""
V1_OF_025 = """
class GPUModelRunner:
    device = None
    def _allocate_kv_cache_tensors(self, kv_cache_config):
        tensors = kv_cache_config.kv_cache_tensors
        return {t.name: torch.zeros(t.size, dtype=torch.int8, device=self.device) for t in tensors}
"""


def test_both_runners_of_025_get_their_layers_from_the_pool(offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_order_of_dimensions", lambda: "NHD")
    placing = pool._Placing(adopting=False, v2=True)
    cache = config(*(SimpleNamespace(size=4096, block_stride=0, name=f"l{i}") for i in range(3)))
    for source in (V2_OF_025, V1_OF_025):
        module = engine(source)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(pool, "_placed", None)
        if source is V2_OF_025:
            layers = placing.by_layers(module._allocate_kv_cache)(cache, {}, CPU)
        else:
            runner = module.GPUModelRunner()
            runner.device = CPU
            layers = placing.by_runner(module.GPUModelRunner._allocate_kv_cache_tensors)(runner, cache)
        assert [layers[f"l{i}"].offset for i in range(3)] == [0, 4096, 8192]


# ---- telling the holder


def test_the_holder_is_told_where_the_blocks_lie_and_what_they_mean(
    offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = place(adopting=False)
    monkeypatch.setattr(pool, "_placed", found)
    views = {"l0": View((BLOCKS, 512), found.memory.address)}
    pool.announce(views, BLOCKS, 16)
    meta = PoolMeta.from_json(announced["w0/2/0"])
    assert meta.layout == PoolLayout(BLOCKS, 16, (Plane(0, 512, 512),))
    assert (meta.memory, meta.gpu_uuid, meta.owner["adopted_from"]) == (HOST, None, None)
    assert (meta.owner["meaning"], meta.owner["shape"]) == (meaning_of(views, BLOCKS), SHAPE)
    assert (meta.owner["kv_bytes"], meta.owner["commits"]) == (SIZE, False)
    pool.announce(views, BLOCKS, 16, commits=True)
    assert PoolMeta.from_json(announced["w0/2/0"]).owner["commits"] is True


def test_an_adopted_pool_whose_blocks_would_be_read_otherwise_is_not_announced(
    offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = place()
    monkeypatch.setattr(pool, "_placed", found)
    with pytest.raises(PoolError, match="read otherwise"):
        pool.announce({"l0": View((BLOCKS, 16, 64), found.memory.address)}, BLOCKS, 16)
    assert announced == {}
    pool.announce({"l0": View((BLOCKS, SIZE // BLOCKS), found.memory.address)}, BLOCKS, 16)
    assert announced["w0/2/0"]["owner"]["adopted_from"] == offered


@pytest.fixture
def worker_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, also where there is no vLLM."""
    monkeypatch.setitem(sys.modules, f"{package.__name__}.loads", SimpleNamespace(Load=object))
    name = f"{package.__name__}.worker_side"
    module = importlib.import_module(name)
    monkeypatch.setattr(module.ranks, "install", lambda: None)
    yield module
    del sys.modules[name], package.worker_side  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [True, False, AttributeError("this vLLM has no such option")])
def test_a_worker_adopts_only_where_its_engine_is_known_to_have_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, worker_side: Any, answer: bool | Exception
) -> None:
    def may_adopt(config: Any) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    told: list[tuple[bool, bool]] = []
    monkeypatch.setattr(pool, "install", lambda *, adopting, v2: told.append((adopting, v2)))
    monkeypatch.setattr(worker_side, "may_adopt", may_adopt)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    cache = SimpleNamespace(block_size=16)
    config = SimpleNamespace(cache_config=cache, parallel_config=parallel, use_v2_model_runner=True)
    worker_side.WorkerSide(PluginSettings("w0", 2, Path("/s/holder.sock"), None, None, 10.0), config, None)
    assert told == [(answer is True, True)]
