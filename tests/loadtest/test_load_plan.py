"""Fault plans: drawn from a seed, read from a file, and refused where nobody could carry them out."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from midstream.loadtest.load.fault_plan import KILLS, ArenaSize, Kind, draw_kills, read_plan
from midstream.loadtest.load.strategies import Strategy, route_of, settings_of
from midstream.session.errors import ConfigError


def plan_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "faults.yaml"
    file.write_text(text)
    return file


def test_kills_are_of_their_seed_and_of_all_kinds_evenly() -> None:
    plan = draw_kills(10, 5.0, seed=1)
    assert plan == draw_kills(10, 5.0, seed=1)
    assert plan != draw_kills(10, 5.0, seed=2)
    assert [fault.number for fault in plan.faults] == list(range(1, 11))
    counted = Counter(fault.kind for fault in plan.faults)
    assert set(counted) == set(KILLS)
    assert max(counted.values()) - min(counted.values()) <= 1
    times = [0.0, *(fault.at_s for fault in plan.faults)]
    assert all(2.5 <= b - a <= 7.5 for a, b in pairwise(times))


def test_kills_are_as_far_apart_as_the_page_and_the_help_say() -> None:
    gaps = [b - a for a, b in pairwise(fault.at_s for fault in draw_kills(1000, 8.0, seed=3).faults)]
    assert 3.999 <= min(gaps) < 4.5, "at least half"
    assert abs(fmean(gaps) - 8.0) < 0.5, "in the mean"
    root = Path(__file__).parents[2]
    for name in ("docs/loadtest.md", "sidecar/cli_loadtest.py"):
        assert "in the mean, and at least half of" in " ".join((root / name).read_text().split()), name


def test_what_is_told_to_be_installed_is_this_checkout() -> None:
    root = Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), *root.glob("loadtest/**/*.py"), *root.glob("sidecar/*.py"), root / "README.md"]
    told = [
        (page.name, found) for page in pages for found in re.findall(r"pip install [\"']?midstream\b", page.read_text())
    ]
    assert told == []


def test_no_kills_are_no_plan_and_too_many_are_refused() -> None:
    assert draw_kills(0, 5.0, seed=1).faults == ()
    with pytest.raises(ConfigError, match="0 to 1000"):
        draw_kills(1001, 5.0, seed=1)


def test_a_plan_is_read_in_order_of_time(tmp_path: Path) -> None:
    plan = read_plan(
        plan_of(
            tmp_path,
            """
            arena: {slot_count: 2, page_count: 16}
            faults:
              - {at_s: 9, kind: stop, for_s: 3, worker: worker-1}
              - {at_s: 2, kind: kill-tree}
              - {at_s: 4, kind: net-slow, for_s: 2, bytes_per_s: 500}
            """,
        )
    )
    assert [(f.number, f.at_s, f.kind) for f in plan.faults] == [
        (1, 2.0, Kind.KILL_TREE),
        (2, 4.0, Kind.NET_SLOW),
        (3, 9.0, Kind.STOP),
    ]
    assert (plan.faults[2].worker, plan.faults[2].for_s) == ("worker-1", 3.0)
    assert plan.arena == ArenaSize(2, 16)
    assert plan.needs_relay


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3", "expected"),
        ("fault: []", "expected"),
        ("faults: {}", "must be a list"),
        ("faults: [x]", "fault 1: expected an object"),
        ("faults: [{kind: kill-tree}]", "at_s is None"),
        ("faults: [{at_s: 1, kind: earthquake}]", "'earthquake' is unknown"),
        ("faults: [{at_s: -1, kind: term}]", "at_s is -1"),
        ("faults: [{at_s: yes, kind: term}]", "at_s is True"),
        ("faults: [{at_s: 1, kind: term, for_s: 3}]", "does not last"),
        ("faults: [{at_s: 1, kind: net-slow}]", "needs delay_s"),
        ("faults: [{at_s: 1, kind: stop, worker: 3}]", "must be a name"),
        ("faults: [{at_s: 1, kind: stop, when: 3}]", "when is unknown"),
        ("faults: [{at_s: 1, kind: stop, for_s: .nan}]", "for_s is nan"),
        ("arena: {slot_count: 0}", "slot_count is 0"),
        ("arena: 4", "arena: expected"),
        ("faults: [", "cannot be read"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_words(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_plan(plan_of(tmp_path, text))


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.yaml")


def test_only_strategies_that_are_disturbed_get_the_tiny_arena(tmp_path: Path) -> None:
    plan = read_plan(plan_of(tmp_path, "arena: {slot_count: 2, page_count: 16}"))
    assert settings_of(Strategy.KV, plan)["arena.slot_count"] == 2
    assert "arena.slot_count" not in settings_of(Strategy.CONTROL, plan)


def test_strategies_differ_in_nothing_but_in_who_brings_an_answer_to_its_end() -> None:
    nothing = draw_kills(0, 1.0, 1)
    kv, recompute = settings_of(Strategy.KV, nothing), settings_of(Strategy.RECOMPUTE, nothing)
    assert {**kv, "restore.tiers": recompute["restore.tiers"]} == recompute
    assert not route_of(Strategy.KV, ["http://x"]).client_restarts
    restart = route_of(Strategy.RESTART, ["http://x"])
    assert restart.client_restarts
    assert restart.headers == {"X-Midstream-Policy": "off"}
