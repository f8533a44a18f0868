"""What the demo says became of an answer: measured, and never better than it was."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from midstream.loadtest.client import Answer
from midstream.session.errors import EngineError
from midstream.sidecar.demo import Result, _require_whole, _table, compare, lost_and_duplicated

OUTCOME = {"cut": 48, "lag": 2, "outcome": "exact", "tier": "held", "kv_tokens_loaded": 90, "tokens_recomputed": 1}


def answer(*tokens: int, text: str = "Max", finish: str = "length") -> Answer:
    usage = {"prompt_tokens": 5, "completion_tokens": len(tokens)}
    return Answer(status=200, text=text, token_ids=list(tokens), finish=finish, usage=usage, done=True)


def shown(got: Answer, outcomes: list[dict[str, object]]) -> Result:
    return compare("transformers", answer(1, 2, 3), got, outcomes, "worker-0, 1 process")


def test_an_identical_answer_that_was_restored_exactly_is_good() -> None:
    result = shown(answer(1, 2, 3), [OUTCOME])
    assert result.good
    assert (result.identical, result.cut, result.kv_tokens_loaded, result.tokens_recomputed) == (True, 48, 90, 1)


def test_anything_less_is_not_good() -> None:
    assert not shown(answer(1, 2, 3), [{**OUTCOME, "outcome": "recomputed"}]).good
    assert not shown(answer(1, 2, 3, text="Mux"), [OUTCOME]).good
    assert not shown(answer(1, 2, 4), [OUTCOME]).good
    assert not shown(answer(1, 2, 3, finish="stop"), [OUTCOME]).good


def test_an_answer_that_nobody_interrupted_shows_nothing() -> None:
    result = shown(answer(1, 2, 3), [])
    assert (result.outcome, result.good) == ("undisturbed", False)


def test_the_last_takeover_is_the_one_that_is_told() -> None:
    assert shown(answer(1, 2, 3), [{**OUTCOME, "outcome": "interrupted"}, OUTCOME]).outcome == "exact"


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        ([1, 2, 3], (0, 0)),
        ([1, 3], (1, 0)),
        ([1, 2, 2, 3], (0, 1)),
        ([], (3, 0)),
        ([1, 9, 3], (1, 1)),
        ([2, 1, 3], (1, 1)),
    ],
)
def test_lost_and_duplicated_tokens_are_counted(got: list[int], wanted: tuple[int, int]) -> None:
    assert lost_and_duplicated([1, 2, 3], got) == wanted


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_counts_are_zero_only_for_equal_answers_and_always_add_up(wanted: list[int], got: list[int]) -> None:
    lost, duplicated = lost_and_duplicated(wanted, got)
    assert ((lost, duplicated) == (0, 0)) == (wanted == got)
    assert len(got) - len(wanted) == duplicated - lost


def test_an_answer_that_did_not_end_well_is_an_error_that_says_why() -> None:
    broken = answer(1)
    broken.violations.append("the stream ended without [DONE]")
    with pytest.raises(EngineError, match=r"without \[DONE\]"):
        _require_whole(broken)
    refused = replace(answer(1), error={"message": "no worker"})
    with pytest.raises(EngineError, match="no worker"):
        _require_whole(refused)


def test_the_object_has_every_field_that_programs_read() -> None:
    told = json.loads(json.dumps(asdict(shown(answer(1, 2, 3), [OUTCOME]))))
    fields = "engine tokens cut outcome identical lost duplicated gap_ms kv_tokens_loaded tokens_recomputed"
    assert set(fields.split()) <= set(told)


def test_the_table_says_no_when_the_answers_differ() -> None:
    plain = Console(width=100, no_color=True)
    with plain.capture() as caught:
        plain.print(_table(shown(answer(1, 2, 4), [OUTCOME])))
    lines = caught.get().splitlines()
    assert any("identical to the undisturbed answer" in line and "NO" in line for line in lines)
    assert any("lost / duplicated tokens" in line and "1 / 1" in line for line in lines)
