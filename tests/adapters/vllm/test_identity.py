"""What an engine says of itself: no KV where there is an obstacle, and settings that are the same in each process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import identity
from midstream.adapters.vllm.settings import PluginSettings

SETTINGS = PluginSettings("w0", 1, Path("/s/holder.sock"), Path("/s/1.arena"), None, 10.0)
CONFIG: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    cache_config=SimpleNamespace(block_size=16),
    scheduler_config=SimpleNamespace(max_num_seqs=8),
)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with a held pool."""
    monkeypatch.setattr(identity, "_key", lambda config: {"model": "m"})
    monkeypatch.setattr(identity, "_pools", lambda settings, ranks: (["w0/1/0"], True, "f" * 32, [1]))


def test_an_engine_without_obstacles_offers_its_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_inexact", lambda config, cache: [])
    facts, adopted = identity.facts_of(SETTINGS, CONFIG, None)
    assert (facts["pools"], facts["adopted"], facts["inexact"], adopted) == (["w0/1/0"], True, [], True)


def test_an_engine_with_one_says_which_and_offers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_inexact", lambda config, cache: ["spec_decode"])
    facts, adopted = identity.facts_of(SETTINGS, CONFIG, None)
    assert (facts["pools"], facts["adopted"], facts["inexact"], adopted) == ([], False, ["spec_decode"], False)
    # Its text can still be continued elsewhere, so who it is stays known.
    assert facts["key"]["model"] == "m"


def a_function_of_the_operator() -> None:
    """A setting may be one."""


def test_settings_are_plain_values_that_no_process_says_otherwise() -> None:
    assert [identity._plain(value) for value in (None, 7, True, "auto")] == [None, 7, True, "auto"]
    assert identity._plain({"rope_theta": 1e6}) == "{'rope_theta': 1000000.0}"
    assert identity._plain(a_function_of_the_operator) == "a_function_of_the_operator"
