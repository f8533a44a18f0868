"""Which memory an engine runs in: the old engine's only where nothing keeps it from taking care of what lies there."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters import vllm as package
from midstream.adapters.vllm import pool
from midstream.adapters.vllm.settings import PluginSettings
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.held import create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta

SIZE = 4096
SHAPE = "s" * 32
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
    layout = PoolLayout(2, 16, (Plane(0, SIZE // 2, SIZE // 2),))
    meta = PoolMeta(SIZE, layout, layout.fingerprint(), {"pid": 1, "fd": 3, "shape": SHAPE}).to_json()
    held = create_host_pool(SIZE)

    class Holder:
        def __init__(self, path: Path) -> None:
            pass

        def get(self, name: str) -> tuple[int, dict[str, Any]]:
            assert name == "w0/1/0"
            return os.dup(held), meta

    settings = PluginSettings("w0", 2, tmp_path / "holder.sock", arenas[1], arenas[0], 10.0)
    monkeypatch.setattr(pool, "plugin_settings", lambda: settings)
    monkeypatch.setattr(pool, "HolderClient", Holder)
    monkeypatch.setattr(pool, "_rank", lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(frombuffer=lambda memory, dtype: memory, int8=None))
    return "w0/1/0"


def test_an_engine_that_may_adopt_runs_in_the_old_pool(offered: str) -> None:
    assert pool._place(SIZE, SHAPE, adopting=True).adopted_from == offered


def test_an_engine_that_may_not_gets_a_pool_of_its_own(offered: str) -> None:
    assert pool._place(SIZE, SHAPE, adopting=False).adopted_from is None


def test_a_pool_of_another_shape_is_not_adopted(offered: str) -> None:
    assert pool._place(SIZE, "t" * 32, adopting=True).adopted_from is None


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

    told: list[bool] = []
    monkeypatch.setattr(pool, "install", lambda *, adopting: told.append(adopting))
    monkeypatch.setattr(worker_side, "may_adopt", may_adopt)
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    worker_side.WorkerSide(PluginSettings("w0", 2, Path("/s/holder.sock"), None, None, 10.0), config, None)
    assert told == [answer is True]
