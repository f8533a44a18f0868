"""While a worker warms up, what it writes goes to the block that no session has."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters import guard
from midstream.adapters.vllm import warm_up


class BlockTables:
    """vLLM's of the V2 runner, as far as blocks get into it."""

    def __init__(self) -> None:
        self.rows: dict[int, list[list[int]]] = {}

    def append_block_ids(self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        row = self.rows.setdefault(req_index, [[] for _ in new_block_ids])
        for group, ids in enumerate(new_block_ids):
            row[group] = list(ids) if overwrite else row[group] + ids


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether connectors are on, which is when steps are real; in a list, to be changed."""
    on = [False]
    transfer = SimpleNamespace(has_kv_transfer_group=lambda: on[0])
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", transfer)
    return on


def hooked(monkeypatch: pytest.MonkeyPatch, tables: Any) -> bool:
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.block_table", SimpleNamespace(BlockTables=tables))
    return warm_up.keep_off()


def test_made_up_requests_write_to_the_null_block_and_real_ones_to_their_own(
    monkeypatch: pytest.MonkeyPatch, serving: list[bool]
) -> None:
    class Tables(BlockTables):
        append_block_ids = BlockTables.append_block_ids

    assert hooked(monkeypatch, Tables)
    tables = Tables()
    tables.append_block_ids(0, ([1, 2], [3]), overwrite=True)
    tables.append_block_ids(0, ([4], []), overwrite=False)
    assert tables.rows[0] == [[0, 0, 0], [0]]
    serving[0] = True
    tables.append_block_ids(0, ([5, 6], [7]), overwrite=True)
    tables.append_block_ids(0, ([8], []), overwrite=False)
    assert tables.rows[0] == [[5, 6, 8], [7]]


def test_where_that_cannot_be_hooked_it_is_said_and_costs_no_session_its_own_pool(
    monkeypatch: pytest.MonkeyPatch, serving: list[bool]
) -> None:
    monkeypatch.setattr(guard, "missing", [])

    class Tables:
        def append_block_ids(self, request: Any, blocks: Any) -> None:
            """Another vLLM's."""

    assert not hooked(monkeypatch, Tables)
    assert not hooked(monkeypatch, type("Tables", (), {}))
    assert guard.missing == []
