"""A rank says what it has done, and only that: its step is committed after its KV is written, and never after a gap."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import midstream.adapters.vllm as package
from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.vllm import core_hooks, group
from midstream.session import vram
from midstream.session.arena import ArenaReader, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.commits import commit_cell, commit_offset
from midstream.session.errors import ArenaError


@pytest.fixture
def settings(tmp_path: Path) -> PluginSettings:
    """Those of an engine with an arena, which says that it has two ranks."""
    path = tmp_path / "1.arena"
    create_arena(path, slot_count=2, page_count=4)
    writer = ArenaWriter.open(path)
    writer.publish({"pools": ["w0/1/0", "w0/1/1"]})
    writer.close()
    return PluginSettings("w0", 1, Path("/s/holder.sock"), path, None, 10.0)


def config(ranks: int = 2, device: str = "cpu") -> SimpleNamespace:
    """What an engine with so many ranks is configured with."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(block_size=16),
    )


def committed(settings: PluginSettings) -> tuple[int | None, ...]:
    """What the ranks have said so far."""
    assert settings.arena is not None
    return ArenaReader(settings.arena).commits()


def test_ranks_are_counted_through_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(stage: int, rank: int) -> int:
        groups = SimpleNamespace(
            get_pp_group=lambda: SimpleNamespace(rank_in_group=stage),
            get_tp_group=lambda: SimpleNamespace(rank_in_group=rank, world_size=2),
        )
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(distributed=groups))
        monkeypatch.setitem(sys.modules, "vllm.distributed", groups)
        return group.rank_of_worker()

    assert [at(stage, rank) for stage in range(2) for rank in range(2)] == [0, 1, 2, 3]
    both = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3))
    assert group.rank_count(both) == 6


def test_a_rank_commits_each_step_and_stops_for_good_at_one_that_failed(
    settings: PluginSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = []
    for rank in range(2):
        monkeypatch.setattr(group, "rank_of_worker", lambda rank=rank: rank)
        ranks.append(group.Commits(settings, config()))
    for step in (1, 2, 3):
        for commits in ranks:
            commits.done(step, failed=False)
    assert committed(settings) == (3, 3)
    ranks[0].done(4, failed=False)
    ranks[1].done(4, failed=True)
    assert (ranks[0].are_made, ranks[1].are_made) == (True, False)
    for commits in ranks:
        commits.done(5, failed=False)
    assert committed(settings) == (5, 3)


def test_a_step_that_a_rank_was_never_told_of_ends_its_commits(
    settings: PluginSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group, "rank_of_worker", lambda: 0)
    commits = group.Commits(settings, config())
    for step in (1, 3, 4, 2):
        commits.done(step, failed=False)
    assert committed(settings) == (1, None)
    assert [r.message for r in caplog.records if "missed one" in r.message] != []


def test_a_worker_that_is_alone_commits_nothing(settings: PluginSettings) -> None:
    commits = group.Commits(settings, config(ranks=1))
    commits.done(1, failed=False)
    assert (commits.are_made, committed(settings)) == (False, (None, None))


def test_a_rank_that_cannot_commit_says_why(settings: PluginSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "rank_of_worker", lambda: 0)
    with pytest.raises(ArenaError, match="a rank on xpu"):
        group.Commits(settings, config(device="xpu"))
    nowhere = PluginSettings("w0", 1, Path("/s/holder.sock"), None, None, 10.0)
    with pytest.raises(ArenaError, match="beside a sidecar"):
        group.Commits(nowhere, config())


def test_on_a_gpu_the_commit_is_a_store_behind_what_the_stream_has_to_do(
    settings: PluginSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[tuple[int, int, int]] = []
    launched: list[tuple[int, int, int, int]] = []

    def register(address: int, size_bytes: int, device: int) -> int:
        registered.append((address, size_bytes, device))
        return 1 << 40

    def synchronize() -> None:
        for _, at, number, _ in launched:
            ctypes.c_uint64.from_address(at - (1 << 40) + registered[-1][0]).value = number if working else 0
        launched.clear()

    stream = SimpleNamespace(cuda_stream=73, synchronize=synchronize)
    cuda = SimpleNamespace(current_device=lambda: 3, current_stream=lambda device=3: stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(vram, "register_host", register)
    monkeypatch.setattr(vram, "store_on_stream", lambda *told: launched.append(told))
    monkeypatch.setattr(group, "rank_of_worker", lambda: 1)
    working = False
    with pytest.raises(ArenaError, match="does not arrive"):
        group.Commits(settings, config(device="cuda"))
    working = True
    commits = group.Commits(settings, config(device="cuda"))
    commits.done(1, failed=False)
    address, size_bytes, device = registered[-1]
    assert (address % 4096, size_bytes, device) == (0, 4096, 3)
    assert launched == [(73, (1 << 40) + commit_offset(1, 1), commit_cell(1, 1), 3)]
    # It is the GPU that writes it, when it comes to it.
    assert committed(settings) == (None, None)
    synchronize()
    assert committed(settings) == (None, 1)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, also where there is no vLLM."""

    class Base:
        def has_connector_metadata(self) -> bool:
            return self.metadata is not None

        def _get_connector_metadata(self) -> Any:
            return self.metadata

        metadata: Any = None

    base = SimpleNamespace(
        KVConnectorBase_V1=Base, KVConnectorMetadata=object, KVConnectorRole=object, SupportsHMA=object
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.base", base)
    names = ("loads", "scheduler_side", "worker_side", "connector")
    for name in names:
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    yield importlib.import_module(f"{package.__name__}.connector")
    for name in names:
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


def test_vllm_s_own_order_of_calls_commits_a_step_that_was_computed_and_none_that_raised(connector: Any) -> None:
    told: list[tuple[int, bool]] = []
    ours = connector.MidstreamConnector.__new__(connector.MidstreamConnector)
    ours.worker_side = SimpleNamespace(step_done=lambda step, *, failed: told.append((step, failed)))
    ours.worker_side.finished_loads = set
    assert ours.get_finished(set()) == (None, None)
    assert told == [], "without a step's metadata there is no step"

    def forward(step: int, *, raising: bool) -> None:
        ours.metadata = connector.StepMeta([], step)
        try:
            if raising:
                raise RuntimeError("out of memory")
        finally:
            ours.get_finished(set())

    forward(1, raising=False)
    with pytest.raises(RuntimeError):
        forward(2, raising=True)
    forward(3, raising=False)
    assert told == [(1, False), (2, True), (3, False)]


def test_the_journal_is_told_which_step_its_tokens_are_of() -> None:
    told: list[tuple[Any, int | None]] = []
    side = SimpleNamespace(step_begins=lambda: None, step_ends=lambda outputs, step: told.append((outputs, step)))
    scheduler = SimpleNamespace(connector=SimpleNamespace(scheduler_side=side))
    update = core_hooks._journaling(lambda self, scheduled, result: "outputs")
    for metadata in (SimpleNamespace(step=7), SimpleNamespace(step=0), None):
        update(scheduler, SimpleNamespace(kv_connector_metadata=metadata), None)
    update(scheduler, SimpleNamespace(), None)
    assert told == [("outputs", 7), ("outputs", None), ("outputs", None), ("outputs", None)]
