"""docs/exactness.md is true: its rows name tests that there are, and every case has a row with its verdict."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.adapters.sglang import identity as sglang_identity
from midstream.adapters.sglang import obstacles as sglang_obstacles
from midstream.adapters.vllm import identity as vllm_identity
from midstream.adapters.vllm import obstacles as vllm_obstacles
from midstream.proxy.eligible import NO_SESSION, NotResumable
from midstream.proxy.eligible_events import EventObstacle
from midstream.proxy.eligible_generate import GenerateObstacle
from midstream.sidecar import workers
from support.exactness_page import NOTHING, PAGE, ROOT, NoRow, Reference, Row, tables
from support.features import FEATURES, NOT_OFFERED, Feature
from support.obstacles import OBSTACLES
from support.parsing import parsed
from support.sglang_features import FEATURES as SGLANG_FEATURES
from support.vllm_features import FEATURES as VLLM_FEATURES

EMBEDDED = "tests/exactness/test_embedded_features.py"
REFUSALS = "tests/exactness/test_embedded_refusals.py"
VLLM = "tests/adapters/vllm/test_engine_features.py"
SGLANG = "tests/adapters/sglang/test_engine_features.py"
# What stands in the way in an engine is said by its plugin, and by the sidecar for one that has none.
VLLM_SOURCES = (Path(vllm_obstacles.__file__), Path(vllm_identity.__file__))
SGLANG_SOURCES = (Path(sglang_obstacles.__file__), Path(sglang_identity.__file__))
SIDECAR_SOURCES = (Path(workers.__file__),)
NOT_HERE = "not offered"
PASSED = "passed through"
VERDICTS = {"exact", "recomputed", "restarted", "refused", NOT_HERE, PASSED, NOTHING}
FIELD_CASES = [*(f"r{n}" for n in range(1, 13)), "s1", "w3"]


@pytest.fixture(scope="module")
def page() -> dict[str, list[Row]]:
    """The page's tables."""
    return tables(PAGE.read_text())


@pytest.fixture(scope="module")
def rows(page: dict[str, list[Row]]) -> list[Row]:
    """All rows of all tables."""
    return [row for table in page.values() for row in table]


@pytest.fixture(scope="module")
def collected(rows: list[Row]) -> set[str]:
    """Node ids of the tests in all files that the page names, as pytest finds them."""
    paths = sorted({reference.path for row in rows for reference in row.tests})
    missing = [path for path in paths if not (ROOT / path).is_file()]
    assert not missing, f"docs/exactness.md names files that there are not: {missing}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_every_row_has_a_verdict_for_each_engine_and_names_tests_that_there_are(
    rows: list[Row], collected: set[str]
) -> None:
    assert len(rows) > 100
    wrong = []
    for row in rows:
        if not set(row.verdicts()) <= VERDICTS or set(row.verdicts()) == {NOTHING}:
            wrong.append(f"{row.name}: verdicts {row.verdicts()}")
        if not row.tests:
            wrong.append(f"{row.name}: no test")
        wrong += [
            f"{row.name}: no test is {reference}"
            for reference in row.tests
            if not any(reference.covers(node) for node in collected)
        ]
    assert wrong == []


def test_no_feature_has_two_rows(page: dict[str, list[Row]]) -> None:
    for name in ("feature", "case", "feature of SGLang"):
        names = [row.name for row in page[name]]
        assert len(names) == len(set(names)), f"twice: {sorted(n for n in names if names.count(n) > 1)}"


def of_case(rows: list[Row], path: str, case: str) -> list[Row]:
    """The rows that name a case of a table of cases."""
    return [row for row in rows if any(ref.path == path and ref.case == case for ref in row.tests)]


@pytest.mark.parametrize("feature", [pytest.param(feature, id=feature.name) for feature in FEATURES])
def test_every_feature_of_the_embedded_engine_has_its_row(page: dict[str, list[Row]], feature: Feature) -> None:
    found = of_case(page["feature"], EMBEDDED, feature.name)
    assert {row.embedded for row in found} == {feature.streamed, feature.unstreamed} - {""}


@pytest.mark.parametrize("name", [asked.name for asked in NOT_OFFERED])
def test_everything_that_the_embedded_engine_does_not_offer_has_its_row(page: dict[str, list[Row]], name: str) -> None:
    found = of_case([*page["feature"], *page["word"]], REFUSALS, name)
    assert {row.embedded for row in found} == {NOT_HERE}


@pytest.mark.parametrize("name", [feature.name for feature in VLLM_FEATURES])
def test_every_feature_of_vllm_has_its_row(page: dict[str, list[Row]], name: str) -> None:
    found = of_case(page["feature"], VLLM, name)
    assert {row.vllm for row in found} == {next(f.outcome for f in VLLM_FEATURES if f.name == name)}


@pytest.mark.parametrize("name", [feature.name for feature in SGLANG_FEATURES])
def test_every_feature_of_sglang_has_its_row(page: dict[str, list[Row]], name: str) -> None:
    found = of_case(page["feature of SGLang"], SGLANG, name)
    assert {row.sglang for row in found} == {next(f.outcome for f in SGLANG_FEATURES if f.name == name)}


def test_every_obstacle_of_a_request_has_its_row_and_its_request(page: dict[str, list[Row]]) -> None:
    assert {asked.word for asked in OBSTACLES} == {*NotResumable, *EventObstacle, *GenerateObstacle}
    passed = {word.value for word in NO_SESSION}
    for words, told in (
        ({*NotResumable, *EventObstacle}, {row.name: row.vllm for row in page["word"]}),
        ({*GenerateObstacle}, {row.name: row.sglang for row in page["word of SGLang"]}),
    ):
        named = {word.value for word in words}
        assert {w: told.get(w) for w in named} == {w: PASSED if w in passed else "refused" for w in named}


def test_every_obstacle_of_an_engine_has_its_row(page: dict[str, list[Row]]) -> None:
    # A request and an engine may share a word, so a word may have two rows.
    told = {(row.name, row.verdicts()) for row in page["word"]}
    assert {(word, ("refused", NOTHING)) for word in words_of(*VLLM_SOURCES)} - told == set()
    assert {(word, ("refused", "refused")) for word in words_of(*SIDECAR_SOURCES)} - told == set()
    of_sglang = {row.name for row in page["word of SGLang"] if row.sglang == "refused"}
    assert words_of(*SGLANG_SOURCES) - of_sglang == set()


def test_no_row_is_of_a_word_that_there_is_not(page: dict[str, list[Row]]) -> None:
    asked = {word.value for word in (*NotResumable, *EventObstacle)}
    assert {row.name for row in page["word"]} == asked | words_of(*VLLM_SOURCES, *SIDECAR_SOURCES)
    of_generate = {word.value for word in GenerateObstacle}
    assert {row.name for row in page["word of SGLang"]} == of_generate | words_of(*SGLANG_SOURCES)


def words_of(*sources: Path) -> set[str]:
    """The words that modules give for obstacles: first in a rule, in a returned list, or appended to one."""
    found: set[str] = set()
    for node in (node for source in sources for node in ast.walk(parsed(source))):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(word)), ast.Call() | ast.Name() | ast.Lambda()]):
                found.add(word)
            case ast.Return(value=value) if value is not None:
                lists = [part for part in ast.walk(value) if isinstance(part, ast.List)]
                found |= {word for part in lists for element in part.elts for word in _either(element)}
            case ast.Call(func=ast.Attribute(attr="append"), args=[ast.Constant(value=str(word))]):
                found.add(word)
    return found


def _either(element: ast.expr) -> set[str]:
    """The word that stands in a list, or both where a condition chooses."""
    match element:
        case ast.Constant(value=str(word)):
            return {word}
        case ast.IfExp(body=body, orelse=orelse):
            return _either(body) | _either(orelse)
        case _:
            return set()


def test_the_words_of_an_engine_are_found_in_its_source() -> None:
    found = words_of(*VLLM_SOURCES)
    assert {"spec_decode", "scheduler", "logits_processors", "kv_groups", "sliding_window", "version"} <= found
    assert {"hooks", "random_state"} <= found
    assert words_of(*SIDECAR_SOURCES) == {"no_pool", "no_plugin"}
    found = words_of(*SGLANG_SOURCES)
    assert {"lora", "page_size", "version", "hooks", "random_state", "attention", "multimodal"} <= found


@pytest.mark.parametrize("case", FIELD_CASES)
def test_every_case_from_the_field_has_its_row_and_its_tests(
    page: dict[str, list[Row]], collected: set[str], case: str
) -> None:
    [row] = [row for row in page["case"] if row.name == case]
    assert row.vllm == "exact"
    assert row.embedded in ("exact", NOT_HERE)
    named = [n for n in collected if f"::test_{case}_" in n and any(ref.covers(n) for ref in row.tests)]
    assert named, "no test of the case's own name is among them"
    assert row.sglang == ("exact" if any("[sglang" in n for n in named) else NOTHING)


def test_a_page_that_is_not_true_is_noticed() -> None:
    head = "| feature | request | vLLM | embedded | test |\n|---|---|---|---|---|\n"
    [row] = tables(head + "| a | `b` | exact | - | `tests/a/test_b.py::test_c` [d]; `tests/a/test_b.py` [e, f] |")[
        "feature"
    ]
    assert row.tests == (Reference("tests/a/test_b.py", "test_c", "d"), Reference("tests/a/test_b.py", "", "e, f"))
    assert (row.vllm, row.embedded, row.sglang) == ("exact", "-", "-")
    assert row.tests[0].covers("tests/a/test_b.py::test_c[d]")
    assert row.tests[0].covers("tests/a/test_b.py::test_c[True-d]")
    assert not row.tests[0].covers("tests/a/test_b.py::test_c[e]")
    assert not row.tests[0].covers("tests/a/test_b.py::test_x[d]")
    for broken in ("| a | b | exact | - | see the tests |", "| a | b | exact | `tests/a/test_b.py::test_c` |"):
        with pytest.raises(NoRow):
            tables(head + broken)
