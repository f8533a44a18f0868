"""A pool that is about to be adopted is room on the card, and decides the size of the cache; any other is neither."""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import room
from midstream.adapters.vllm.pool import Adopted
from midstream.session.errors import PoolError
from midstream.session.layout import HOST, Plane, PoolLayout, PoolMeta, cuda_memory

HERE = "GPU-7a0c8b8f-1d3e-4f6a-9b2c-0123456789ab"
ELSEWHERE = "GPU-00000000-1d3e-4f6a-9b2c-0123456789ab"
SIZE, KV_BYTES, FREE, PROFILED = 1 << 20, 1_000_000, 500_000, 777
LAYOUT = PoolLayout(4, 16, (Plane(0, SIZE // 4, SIZE // 4),))


@dataclass
class Snapshot:
    """vLLM's, as far as it is asked for here."""

    free_memory: int


def make_engine() -> Any:
    """vLLM's module with its worker: it starts where its share of the card is free, and takes what it has profiled."""

    class Worker:
        vllm_config = "a configuration"

        def init_device(self) -> None:
            self.snapshot = Snapshot(FREE)
            self.requested = module.request_memory(self.snapshot, None)

        def determine_available_memory(self) -> int:
            return PROFILED

    def request_memory(init_snapshot: Snapshot, cache_config: Any) -> int:
        if init_snapshot.free_memory < SIZE:
            raise ValueError("free memory is less than the desired share")
        return SIZE

    module = SimpleNamespace(Worker=Worker, request_memory=request_memory, __name__="gpu_worker")
    return module


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is offered, and whether it may be taken; to be changed."""
    found = SimpleNamespace(memory=cuda_memory(HERE), owner={"kv_bytes": KV_BYTES}, may=True, asked=[])

    def offered(settings: Any, rank: int) -> tuple[int, Adopted]:
        if found.memory is None:
            raise PoolError("it is not held any more")
        identity = "" if found.memory == HOST else "0" * 32
        meta = PoolMeta(SIZE, LAYOUT, LAYOUT.fingerprint(), found.owner, found.memory, identity)
        return os.open(os.devnull, os.O_RDONLY), Adopted("w0/1/0", meta)

    monkeypatch.setattr(room, "_kv_bytes", None)
    monkeypatch.setattr(room, "offered", offered)
    monkeypatch.setattr(room, "gone", lambda settings: found.asked.append("gone"))
    monkeypatch.setattr(room, "rank_of_worker", lambda: 0)
    monkeypatch.setattr(room, "device_uuid", lambda device: HERE)
    monkeypatch.setattr(room, "may_adopt", lambda config: found.may and config == "a configuration")
    monkeypatch.setattr(room, "plugin_settings", lambda: SimpleNamespace(adopt="1.arena"))
    monkeypatch.setattr(room.multiprocessing, "parent_process", lambda: "the front end")
    cuda = SimpleNamespace(current_device=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return found


def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = make_engine()
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", SimpleNamespace(gpu_worker=module))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", module)
    room.install()
    return module


def test_the_pool_to_be_adopted_is_free_memory_and_the_cache_is_as_large_as_it(
    old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    worker = hooked(monkeypatch).Worker()
    worker.init_device()
    assert worker.snapshot.free_memory == FREE + SIZE
    assert worker.determine_available_memory() == KV_BYTES
    # The old engine had ended before free memory was looked at, and nothing of its pool is open here.
    assert old.asked == ["gone"]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert room._worker is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"memory": None}, id="gone"),
        pytest.param({"memory": HOST}, id="in host memory"),
        pytest.param({"memory": cuda_memory(ELSEWHERE)}, id="on another GPU"),
        pytest.param({"owner": {}}, id="without its size"),
        pytest.param({"owner": {"kv_bytes": SIZE + 1}}, id="larger than itself"),
        pytest.param({"may": False}, id="of an engine that may not adopt"),
    ],
)
def test_any_other_pool_is_what_it_is_for_an_engine_without_midstream(
    old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    vars(old).update(change)
    worker = hooked(monkeypatch).Worker()
    with pytest.raises(ValueError, match="less than the desired share"):
        worker.init_device()
    assert worker.snapshot.free_memory == FREE
    assert worker.determine_available_memory() == PROFILED


def test_what_fails_in_it_changes_nothing(old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: Any) -> bool:
        raise AttributeError("this vLLM has no such option")

    monkeypatch.setattr(room, "may_adopt", failing)
    worker = hooked(monkeypatch).Worker()
    with pytest.raises(ValueError, match="less than the desired share"):
        worker.init_device()
    assert worker.determine_available_memory() == PROFILED


@pytest.mark.parametrize(
    "settings",
    [pytest.param(None, id="no sidecar"), pytest.param(SimpleNamespace(adopt=None), id="nothing to adopt")],
)
def test_nothing_is_hooked_where_nothing_is_offered(
    old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(room, "plugin_settings", lambda: settings)
    untouched = make_engine()
    names = {name: function.__qualname__ for name, function in vars(untouched.Worker).items() if callable(function)}
    module = hooked(monkeypatch)
    found = {name: function.__qualname__ for name, function in vars(module.Worker).items() if callable(function)}
    assert found == names
    assert module.request_memory.__name__ == "request_memory"
    assert not hasattr(module.request_memory, "__wrapped__")
