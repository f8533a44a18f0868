"""The record of `verify`: what makes a pass, what it says of engines that changed, and that a page shows all of it."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from midstream.loadtest.verify import record, screen
from midstream.loadtest.verify.cuts import Task, Way
from midstream.loadtest.verify.html import page
from midstream.loadtest.verify.judge import Reading, Settling, Verdict, judge
from midstream.loadtest.verify.plants import Attempt, Fault, Planted
from midstream.loadtest.verify.prompts import COMPLETIONS, Prompt
from midstream.loadtest.verify.record import Identity, Status
from midstream.loadtest.verify.runs import Run
from midstream.loadtest.verify.verification import Case, Controlled, Findings, Options
from midstream.session.errors import ConfigError

KEY = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "torch_version": "2.13.0",
    "device": "NVIDIA H200 driver 580.65.06",
    "model": "abc",
    "tokenizer": "def",
    "dtype": "bfloat16",
    "kv_dtype": "auto",
    "kv_layout": "0ec2",
    "block_tokens": 16,
    "parallel": "tp1",
    "lora": None,
}
IDENTITY = Identity(KEY, "smollm2", "0.1.0", "2026-11-29T22:00:00+00:00", {"platform": "linux"}, ("vllm", "serve", "m"))
NASTY = '<script>alert("1")</script>'
GOOD = Reading((1, 2, 3, 4), "abcd", (), "length", (5, 4))
PROMPT = Prompt(NASTY, COMPLETIONS, {"prompt": "secret words", "temperature": 0})
FOUND = tuple(Planted(fault, True, (Attempt("block 3", "exact", "restore", 7),)) for fault in Fault)


def case(column: str = "middle", *, outcome: str = "exact", got: Reading = GOOD, way: Way = Way.MOVE) -> Case:
    run = Run(got, "a" * 32, outcome, "held", journal=2, kept=2, gap_ms=120.0, killed=("x:1",) * (way is Way.KILL))
    return Case(Task(0, column, way, 3), NASTY, 2, run, judge((GOOD, GOOD), got, Settling.GREEDY, run.interruption))


def findings(*cases: Case, planted: tuple[Planted, ...] = FOUND, **changes: Any) -> Findings:
    controlled = Controlled(PROMPT, Settling.GREEDY, (GOOD, GOOD), **changes)
    return Findings([controlled], list(cases), list(planted))


def stopped(*cases: Case, planted: tuple[Planted, ...]) -> Findings:
    found = findings(*cases, planted=planted)
    found.stopped = "the sidecar has ended\nits log"
    return found


def made(found: Findings, **options: Any) -> dict[str, Any]:
    return record.record(found, Options((PROMPT,), **options), IDENTITY, 12.5)


PASSED = made(findings(case("first"), case("middle", way=Way.KILL), case("last-1", way=Way.DISK)))
WRONG = replace(GOOD, tokens=(1, 2, 9, 4))


def test_a_pass_is_every_answer_identical_and_every_fault_found() -> None:
    assert record.status(PASSED) is Status.PROVEN
    assert (PASSED["cases"], PASSED["identical"], PASSED["kills"]) == (3, 3, 1)
    assert PASSED["mismatches_planted_found"] == 3


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (made(findings(case(), case(got=WRONG))), Status.FAILED),
        (made(findings(case(), planted=(replace(FOUND[0], found=False), *FOUND[1:]))), Status.FAILED),
        (made(findings(case(), planted=FOUND[:2])), Status.FAILED),
        (made(findings(case(), case(outcome="recomputed"))), Status.OPEN),
        (made(findings(case(), case(outcome="refused"))), Status.OPEN),
        (made(findings(case(), case(outcome=""))), Status.OPEN),
        (made(findings(case(), planted=()), faults=()), Status.OPEN),
        (made(findings()), Status.OPEN),
        (made(findings(case(), error="error: 400")), Status.OPEN),
        (made(stopped(case(), planted=FOUND[:1])), Status.STOPPED),
        (made(stopped(case(), case(got=WRONG), planted=())), Status.FAILED),
    ],
)
def test_anything_less_is_no_pass(told: dict[str, Any], wanted: Status) -> None:
    assert record.status(told) is wanted
    assert screen.headline(told, wanted)
    assert page(told)


def test_a_failure_says_where_the_answer_went_another_way() -> None:
    told = made(findings(replace(case(got=WRONG), top=((" dog", -0.5),), log=("a line",))))
    [run] = told["runs"]
    assert run["difference"]["first"] == 2
    assert (run["difference"]["wanted"], run["difference"]["got"]) == (3, 9)
    assert run["got_around"] == [1, 2, 9, 4]
    assert run["top_logprobs"] == [[" dog", -0.5]]
    assert run["log"] == ["a line"]
    [line] = screen.differences(told)
    assert "token 3: 3 became 9" in line["first"]
    assert "' dog' -0.500" in line["why"]


def test_a_record_names_what_was_verified_and_gives_no_prompt_away() -> None:
    assert PASSED["identity"]["versions"] == {
        "gpu": "NVIDIA H200",
        "driver": "580.65.06",
        "engine": "vllm 0.32.0 (torch 2.13.0)",
        "model": "abc",
    }
    text = json.dumps(PASSED)
    assert "secret words" not in text
    assert all(name in text for name in ("smollm2", "2026-11-29", "0.1.0", '"seed": 1'))


def test_neither_record_nor_page_gives_a_secret_of_the_command_away() -> None:
    identity = replace(IDENTITY, command=("vllm", "serve", "m", "--hf-token", "hf_secret", "--api-key=sk-secret"))
    told = record.record(findings(case()), Options((PROMPT,)), identity, 12.5)
    assert told["identity"]["command"] == ["vllm", "serve", "m", "--hf-token", "***", "--api-key=***"]
    assert "secret" not in page(told).replace("secret words", "")


def test_recovery_times_are_told_by_way() -> None:
    assert PASSED["recovery_ms"]["kill"] == {"count": 1, "p50": 120.0, "p90": 120.0, "p99": 120.0, "max": 120.0}
    assert set(PASSED["recovery_ms"]) == {"kill", "move", "disk"}
    assert made(findings(case(outcome="")))["recovery_ms"] == {}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record.write(record.text(PASSED), tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == json.loads(json.dumps(PASSED))
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_what_is_no_record_is_refused_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for text, why in (
        ("{", "r.json"),
        ("[]", "not a record"),
        ('{"kind": "midstream-verify", "v": 2}', "version 2"),
        ('{"kind": "midstream-verify", "v": 1}', "damaged"),
        (json.dumps({**PASSED, "identity": {**PASSED["identity"], "key": {}}}), "damaged"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            record.read(file)
    with pytest.raises(ConfigError, match="--record"):
        record.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="folder"):
        record.write("", tmp_path / "none" / "r.json")


@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("device", "NVIDIA H100 driver 580.65.06", {"gpu"}),
        ("device", "NVIDIA H200 driver 590.1", {"driver"}),
        ("device", "NVIDIA H100 driver 590.1", {"gpu", "driver"}),
        ("engine_version", "0.33.0", {"engine"}),
        ("torch_version", "2.14", {"engine"}),
        ("model", "xyz", {"model"}),
        ("tokenizer", "xyz", {"model"}),
        ("lora", "rank8", {"model"}),
        ("dtype", "float16", {"dtype"}),
        ("block_tokens", 32, {"block_tokens"}),
        ("attention", "flash", {"attention"}),
    ],
)
def test_a_record_says_which_version_changed(field: str, value: object, changed: set[str]) -> None:
    found = record.check(PASSED, {**KEY, field: value}, "0.1.0")
    assert not found.holds
    assert set(found.changed) == changed
    assert all(then != now for then, now in found.changed.values())


def test_a_record_holds_for_what_it_was_made_with_and_for_nothing_if_it_was_no_proof() -> None:
    assert record.check(PASSED, KEY, "0.1.0").holds
    assert set(record.check(PASSED, KEY, "0.2.0").changed) == {"midstream"}
    failed = record.check(made(findings(case(got=WRONG))), KEY, "0.1.0")
    assert (failed.holds, failed.proven, failed.changed) == (False, False, {})


def test_a_processor_is_named_where_there_is_no_gpu() -> None:
    told = record.versions(
        {"device": "cpu AVX512, Intel", "engine": "transformers", "engine_version": "5", "model": "m"}
    )
    assert (told.gpu, told.driver, told.engine) == ("cpu AVX512, Intel", "none", "transformers 5")
    assert record.versions({"device": "NVIDIA H200, driver 580", "model": "m"}).gpu == "NVIDIA H200"


def test_the_page_of_documentation_names_every_field_verdict_and_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    assert [name for name in PASSED if f"`{name}`" not in text] == []
    assert [verdict for verdict in Verdict if f"| `{verdict.value}` |" not in text] == []
    assert [status for status in Status if f"\n| {status.value} | " not in text] == []


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href", "style")]


def test_the_page_is_self_contained_and_nothing_in_it_comes_alive() -> None:
    told = made(findings(case("first"), case(got=WRONG, way=Way.DISK), case("last-1", outcome="recomputed")))
    shown = page(told)
    found = _Links()
    found.feed(shown)
    assert (found.outside, "script" in found.tags) == ([], False)
    assert "url(" not in shown
    assert NASTY not in shown
    assert "&lt;script&gt;" in shown


def test_the_pages_plots_are_whole_and_have_a_mark_for_each_case() -> None:
    told = made(findings(case("first"), case("middle", way=Way.DISK), case("last-1", got=WRONG, way=Way.KILL)))
    pictures = re.findall(r"<svg.*?</svg>", page(told), re.DOTALL)
    assert len(pictures) == 2
    grid, gaps = (ET.fromstring(picture) for picture in pictures)
    space = "{http://www.w3.org/2000/svg}"
    classes = [rect.get("class") for rect in grid.iter(f"{space}rect")]
    assert classes == ["v-identical", "v-identical", "v-restore"]
    assert len(list(gaps.iter(f"{space}circle"))) == 3
    titles = [title.text or "" for title in grid.iter(f"{space}title")]
    assert "restore (kill at token 2, 120 ms)" in titles[2]


def test_the_page_says_first_what_it_came_to() -> None:
    assert "Exact: every interrupted answer was the undisturbed one (3 of 3)" in page(PASSED)
    unplanted = made(findings(case(), planted=(replace(FOUND[0], found=False), *FOUND[1:])))
    assert "only 2 of 3 planted faults were found" in page(unplanted)
    assert "NOT FOUND" in page(unplanted)
