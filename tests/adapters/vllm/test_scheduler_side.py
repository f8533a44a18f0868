"""The scheduler side with several ranks: steps have numbers, tokens say of which they are, loads need all ranks."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import midstream.adapters.vllm as package
from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.prompt import prompt_hash
from midstream.session.arena import ArenaReader, create_arena
from midstream.session.commit_writer import CommitWriter
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume
from midstream.session.records import LoadState

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7]
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(data_parallel_index=0), cache_config=SimpleNamespace(block_size=4)
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scheduler side, also where there is no vLLM."""
    base = SimpleNamespace(KVConnectorMetadata=object)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.base", base)
    names = ("loads", "scheduler_side")
    for name in names:
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    found = importlib.import_module(f"{package.__name__}.scheduler_side")
    monkeypatch.setattr(found, "draws_are_known", lambda config: True)
    yield found
    for name in names:
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


class Engine:
    """A scheduler side with one request, and the ranks that compute it."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: int) -> None:
        path = folder / "1.arena"
        create_arena(path, slot_count=4, page_count=16)
        facts = {"pools": [f"w0/1/{rank}" for rank in range(ranks)]}
        monkeypatch.setattr(module, "facts_of", lambda *told: (facts, False))
        settings = PluginSettings("w0", 1, folder / "holder.sock", path, None, 10.0)
        self.side = module.SchedulerSide(settings, CONFIG, None)
        self.reader = ArenaReader(path)
        self.ranks = [CommitWriter(path, rank) for rank in range(ranks)]

    def ask(self, outputs: tuple[int, ...] = ()) -> Any:
        """A new request, or one that goes on."""
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=PROMPT, pooling_params=None, lora_request=None,
            sampling_params=SimpleNamespace(seed=None, temperature=0.0), num_tokens=len(PROMPT) + len(outputs),
        )  # fmt: skip
        resume = Resume(outputs, KvSource.HELD, prompt_hash(PROMPT)) if outputs else None
        self.side.on_new_request(request, Marker(SESSION, 2 if outputs else 1, resume))
        return request

    def schedule(self, *new: tuple[str, list[int], int]) -> Any:
        """The metadata of a step that schedules these requests anew."""
        requests = [SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=n) for r, b, n in new]
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.side.step_meta(SimpleNamespace(scheduled_new_reqs=requests, scheduled_cached_reqs=cached))

    def finish_step(self, step: int | None, token: int) -> None:
        """The scheduler takes a step's token in."""
        self.side.step_begins()
        output = SimpleNamespace(request_id="r", new_token_ids=[token], finish_reason=None)
        self.side.step_ends({0: SimpleNamespace(outputs=[output])}, step)

    def counted(self) -> tuple[int, int]:
        """How many tokens were journaled, and how many of them all ranks have done."""
        slot = self.reader.find(SESSION)
        assert slot is not None
        journaled = len(self.reader.journal(slot))
        return journaled, self.reader.committed(slot, journaled)


@pytest.fixture
def engine(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    return Engine(module, monkeypatch, tmp_path, ranks=2)


def test_each_step_has_a_number_that_ranks_can_commit_and_tokens_are_of_theirs(engine: Engine) -> None:
    engine.ask()
    steps = [engine.schedule(("r", [1, 2], 0)).step, engine.schedule().step, engine.schedule().step]
    assert steps == [1, 2, 3]
    # Two steps are on their way when the first one's token comes in.
    for step in steps[:2]:
        for rank in engine.ranks:
            assert rank.commit(step)
    engine.finish_step(1, 100)
    engine.finish_step(2, 101)
    assert engine.counted() == (2, 2)
    assert engine.ranks[0].commit(3)
    engine.finish_step(3, 102)
    assert engine.counted() == (3, 2)
    assert engine.ranks[1].commit(3)
    assert engine.counted() == (3, 3)


def test_a_token_of_a_step_without_number_does_not_count_until_a_later_one_does(engine: Engine) -> None:
    engine.ask()
    engine.schedule(("r", [1, 2], 0))
    for rank in engine.ranks:
        assert rank.commit(1)
    engine.finish_step(None, 100)
    assert engine.counted() == (1, 0)
    engine.finish_step(1, 101)
    assert engine.counted() == (2, 2)


def test_an_engine_with_one_rank_marks_nothing(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = Engine(module, monkeypatch, tmp_path, ranks=1)
    marked: list[int] = []
    monkeypatch.setattr("midstream.session.arena_writer.SlotWriter.mark", lambda slot, step: marked.append(step))
    alone.ask()
    alone.schedule(("r", [1, 2], 0))
    alone.finish_step(1, 100)
    assert (alone.counted(), marked) == ((1, 1), [])


@pytest.mark.parametrize("fails_in", [None, "first", "last"])
def test_a_load_that_failed_in_one_rank_has_failed_whenever_the_others_are_done(
    engine: Engine, fails_in: str | None
) -> None:
    request = engine.ask(outputs=(100, 101))
    assert engine.side.matched(request, 0) == (4, True)
    engine.side.allocated(request, [1, 2], 4)
    slot = engine.reader.find(SESSION, 2)
    assert slot is not None
    engine.reader.answer(slot, LoadState.DONE, 4)
    # One rank sees the answer a step before the other; vLLM tells of the load when both have.
    engine.side.load_ended(set(), {1, 2} if fails_in == "first" else set())
    engine.side.load_ended({"r"}, {2} if fails_in == "last" else set())
    engine.schedule(("r", [1, 2], 0 if fails_in else 4))
    now = engine.reader.refresh(slot)
    assert now is not None
    assert (now.load, now.loaded) == ((LoadState.FAILED, 0) if fails_in else (LoadState.DONE, 4))
