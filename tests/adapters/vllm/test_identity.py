"""What an engine says of itself: no KV where there is an obstacle, and settings that are the same in each process."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import identity
from midstream.adapters.vllm.settings import PluginSettings
from midstream.session.errors import PoolError

ADOPT = Path("/s/1.arena")
SETTINGS = PluginSettings("w0", 2, Path("/s/holder.sock"), Path("/s/2.arena"), ADOPT, 10.0)


class Holder:
    """What the holder tells of each pool that a rank has announced."""

    def __init__(self, adopted_from: dict[str, str | None]) -> None:
        self._adopted_from = adopted_from

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._adopted_from:
            raise PoolError(f"pool {name} is not held")
        owner = {"pid": 7, "fd": 3, "adopted_from": self._adopted_from[name]}
        return os.open(os.devnull, os.O_RDONLY), {"owner": owner, "fingerprint": "f" * 32}


Engine = Callable[..., tuple[dict[str, Any], bool]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Facts of an engine with these obstacles, of whose ranks these have announced pools."""

    def facts(
        inexact: Sequence[str], pools: dict[str, str | None], ranks: int = 1, adopt: Path | None = ADOPT
    ) -> tuple[dict[str, Any], bool]:
        monkeypatch.setattr(identity, "_key", lambda config: {"model": "m"})
        monkeypatch.setattr(identity, "_inexact", lambda config, cache: list(inexact))
        monkeypatch.setattr(identity, "HolderClient", lambda path: Holder(pools))
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        return identity.facts_of(replace(SETTINGS, adopt=adopt), config, None)

    return facts


def test_an_engine_without_obstacles_offers_its_pools(engine: Engine) -> None:
    facts, adopted = engine([], {"w0/2/0": "w0/1/0"})
    assert (facts["pools"], facts["adopted"], facts["inexact"], adopted) == (["w0/2/0"], True, [], True)
    assert facts["key"]["kv_layout"] == "f" * 32
    facts, adopted = engine([], {"w0/2/0": None})
    assert (facts["pools"], facts["adopted"], adopted) == (["w0/2/0"], False, False)


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
