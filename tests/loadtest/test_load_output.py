"""What a load test leaves behind: whole, readable by programs and by people, and safe to open."""

import csv
import json
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from midstream.loadtest.client import Answer
from midstream.loadtest.load import output
from midstream.loadtest.load.fault_plan import draw_kills
from midstream.loadtest.load.lengths import parse_lengths
from midstream.loadtest.load.live import Live
from midstream.loadtest.load.passes import Passed
from midstream.loadtest.load.plots import draw_plots
from midstream.loadtest.load.records import record_of
from midstream.loadtest.load.run import Options
from midstream.loadtest.load.strategies import Strategy
from midstream.loadtest.load.strike import Logged
from midstream.loadtest.load.workload import COMPLETIONS, Ask, Shape
from midstream.session.errors import ConfigError
from midstream.sidecar.cli_loadtest import is_good

EVIL = '<script>alert("x")</script>'
SECRET = "sk-very-secret"
WANTED = list(range(40))


def passed(name: str, gap_s: float, *, tokens: list[int] | None = None) -> Passed:
    got = WANTED if tokens is None else tokens
    records = []
    for index in range(4):
        live = Live(Ask(index, COMPLETIONS, {}, len(WANTED)), 0, 1.0, sent_s=1.0)
        usage = {"prompt_tokens": 5, "completion_tokens": len(WANTED)}
        live.answer = Answer(status=200, done=True, finish="length", usage=usage)
        for at, token in enumerate(got):
            live.answer.token_ids.append(token)
            live.take(live.answer, 1.5 + 0.01 * at + (gap_s if at >= 20 else 0.0))
        live.ended_s = live.marks[-1].at_s
        outcomes = [{"reason": "process_death", "outcome": "exact", "tier": "held"}] if gap_s else []
        records.append(
            record_of(live, strategy=name, began_s=1.0, controls=[WANTED], fault_times_s=[1.7], outcomes=outcomes)
        )
    fault = Logged(1, "kill-tree", 0.5, 0.7, "2026-01-01T00:00:00+00:00", "worker-0", True, 4, 0, detail=EVIL)
    sessions: dict[str, dict[str, Any]] = {"a": {"outcomes": [{"outcome": "exact", "tier": "held", "reason": "eof"}]}}
    return Passed(name, records, [fault] if gap_s else [], sessions if gap_s else {}, {}, 4.0)


def options() -> Options:
    length = parse_lengths("40", "-")
    return Options(
        command=("engine", EVIL, "--api-key", SECRET),
        shape=Shape(length, length),
        strategies=(Strategy.KV,),
        plan=draw_kills(1, 1.0, 1),
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    output.prepare(folder)
    all_passed = [passed("control", 0.0), passed("kv", 0.2), passed("recompute", 4.0)]
    summary = output.summary_of(options(), EVIL, all_passed, is_complete=True)
    output.write(folder, summary, all_passed)
    return folder


class Page(HTMLParser):
    """Counts what a page has, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_every_request_and_every_fault_is_a_line(written: Path) -> None:
    requests = [json.loads(line) for line in (written / "requests.jsonl").read_text().splitlines()]
    assert [r["strategy"] for r in requests] == ["control"] * 4 + ["kv"] * 4 + ["recompute"] * 4
    assert requests[4]["gaps_ms"] == [pytest.approx(210, abs=0.1)]
    assert requests[0]["token_ids"] == WANTED
    faults = [json.loads(line) for line in (written / "faults.jsonl").read_text().splitlines()]
    assert [f["strategy"] for f in faults] == ["kv", "recompute"]
    assert {(f["kind"], f["at_s"]) for f in faults} == {("kill-tree", 0.7)}
    assert "clock_s" not in faults[0]


def test_the_summary_has_the_names_of_serving_benchmarks_and_compares(written: Path) -> None:
    summary = json.loads((written / "summary.json").read_text())
    kv = summary["strategies"]["kv"]
    for name in (
        "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms",
        "request_throughput", "output_throughput", "total_token_throughput", "completed", "duration",
    ):  # fmt: skip
        assert kv[name] > 0, name
    assert (kv["lost"], kv["repeated"], kv["interrupted"], kv["identical"]) == (0, 0, 4, 4)
    assert kv["outcomes"] == {"exact": 1}
    assert summary["comparison"]["p50_gap_recompute_over_kv"] == pytest.approx(4010 / 210, rel=0.01)
    assert summary["complete"]


def test_the_table_has_a_row_for_each_request(written: Path) -> None:
    with (written / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert float(rows[4]["max_gap_ms"]) == pytest.approx(210, abs=0.1)
    assert rows[4]["verdict"] == "identical"
    assert None not in rows[0]


def test_the_page_needs_nothing_else_and_runs_nothing(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert "script" not in page.tags
    assert page.loads == []
    assert page.tags.count("svg") >= 6
    assert page.tags.count("circle") > 8


def test_no_file_gives_a_secret_of_the_command_away(written: Path) -> None:
    for path in written.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path.name
    assert json.loads((written / "summary.json").read_text())["command"][-2:] == ["--api-key", "***"]


def test_a_folder_that_holds_a_run_is_not_mixed_with_another(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a load test already"):
        output.prepare(written)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        output.prepare(tmp_path / "file")


def test_a_run_without_any_gap_has_a_page_too(tmp_path: Path) -> None:
    only = [passed("control", 0.0)]
    output.write(tmp_path, output.summary_of(options(), "m", only, is_complete=False), only)
    assert "ended early" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["comparison"] == {}


def test_pictures_are_drawn_where_there_is_something_to_draw_with(tmp_path: Path) -> None:
    drawn = draw_plots(tmp_path, [passed("kv", 0.2), passed("recompute", 4.0)])
    if find_spec("matplotlib") is None:
        assert drawn == []
    else:
        assert [path.name for path in drawn] == ["gaps.png", "ttft.png", "itl.png", "tokens.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def told(name: str, *, tokens: list[int] | None = None, **changes: int) -> dict[str, Any]:
    return {"strategies": {name: {**passed(name, 0.2, tokens=tokens).summary(), **changes}}}


@pytest.mark.parametrize("name", ["kv", "recompute", "url"])
def test_a_run_is_good_only_if_midstream_lost_and_repeated_nothing(name: str) -> None:
    assert is_good(told(name))
    Random(1).shuffle(shuffled := list(WANTED))
    for bad in (WANTED[:20] + WANTED[22:], [*WANTED[:20], *WANTED[19:]]):
        assert not is_good(told(name, tokens=bad))
    assert not is_good(told(name, lost=1))
    assert not is_good(told(name, repeated=1))
    assert is_good(told(name, tokens=shuffled)), "different is not lost"


@pytest.mark.parametrize("name", ["control", "engine", "kv", "recompute", "restart", "url"])
def test_whatever_was_compared_a_run_is_not_good_if_answers_failed_or_faults_missed(name: str) -> None:
    assert is_good(told(name))
    assert not is_good(told(name, failed=1))
    missed = passed(name, 0.2)
    missed.faults[0].hit = False
    assert not is_good({"strategies": {name: missed.summary()}})


def test_who_begins_again_may_have_other_tokens() -> None:
    assert is_good(told("restart", lost=3, repeated=2))
