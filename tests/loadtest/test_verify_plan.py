"""What `verify` asks and where it cuts: thirty prompts, a user's own file, and an even plan."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.loadtest.verify.cuts import Place, Task, Way, columns, place, plan
from midstream.loadtest.verify.judge import Settling, settling
from midstream.loadtest.verify.prompts import CHAT, COMPLETIONS, Prompt, built_in, parse_prompts, read_prompts
from midstream.session.errors import ConfigError


def test_the_built_in_set_is_thirty_prompts_that_can_be_settled_and_have_names_of_their_own() -> None:
    prompts = built_in()
    assert len(prompts) == len({p.name for p in prompts}) == 30
    assert {p.path for p in prompts} == {CHAT, COMPLETIONS}
    assert {settling(p.body) for p in prompts} == {Settling.GREEDY, Settling.SEEDED}
    said = json.dumps([dict(p.body) for p in prompts], ensure_ascii=False)
    assert all(piece in said for piece in ("🎉", "def ", "请", "penalty", "json_schema", "min_tokens"))
    assert max(len(json.dumps(dict(p.body))) for p in prompts) > 1000


def test_answers_are_as_long_as_asked_for_and_the_least_length_never_longer() -> None:
    for prompt in built_in(8):
        assert prompt.body["max_tokens"] == 8
        assert prompt.body.get("min_tokens", 0) <= 8


def test_fields_that_an_engine_refuses_can_be_left_out() -> None:
    for name, field in (("json-schema", "response_format"), ("fairy-tale", "min_p")):
        [prompt] = [p for p in built_in() if p.name == name]
        less = prompt.without_optional()
        assert prompt.body.keys() - less.body.keys() == {field}
        assert less.optional == ()


def test_a_line_is_a_body_or_an_entry_of_a_batch() -> None:
    lines = [
        '{"prompt": "a", "max_tokens": 3, "stream": false, "model": "other"}',
        "",
        '{"name": "b", "messages": []}',
        '{"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}',
        '{"name": "b", "prompt": [1, 2]}',
    ]
    prompts = parse_prompts(lines, "f", max_tokens=9)
    assert prompts[0] == Prompt("line-1", COMPLETIONS, {"prompt": "a", "max_tokens": 3})
    assert [p.name for p in prompts] == ["line-1", "b", "c", "b (2)"]
    assert [p.path for p in prompts] == [COMPLETIONS, CHAT, CHAT, COMPLETIONS]
    assert prompts[1].body["max_tokens"] == 9


def test_every_wrong_line_is_named_with_what_is_wrong_with_it() -> None:
    lines = ["[1]", "{", '{"x": 1}', '{"prompt": "a", "n": 2}', '{"url": "/v1/embeddings", "body": {"prompt": "a"}}']
    with pytest.raises(ConfigError) as caught:
        parse_prompts(lines, "mine.jsonl")
    text = str(caught.value)
    for number, word in enumerate(("object", "Expecting", "messages", "n 2", "/v1/embeddings"), 1):
        assert any(line.startswith(f"mine.jsonl:{number}:") and word in line for line in text.splitlines()), text


def test_a_file_that_cannot_be_read_or_is_empty_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JSONL"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="utf-8"):
        read_prompts(tmp_path / "bytes.jsonl")


def test_a_seed_makes_the_same_plan_and_another_seed_another() -> None:
    ways = tuple(Way)
    assert plan(1, 30, 4, ways, 0.1) == plan(1, 30, 4, ways, 0.1)
    assert plan(1, 30, 4, ways, 0.1) != plan(2, 30, 4, ways, 0.1)


def test_kills_are_the_share_that_was_asked_for_and_meet_every_cut() -> None:
    tasks = plan(1, 30, 4, tuple(Way), 0.1)
    assert len(tasks) == 120
    killed = [t for t in tasks if t.way is Way.KILL]
    assert len(killed) == 12
    assert Counter(t.column for t in killed) == {place.value: 3 for place in Place}
    assert len({t.prompt for t in killed}) == 12
    for name in Place:
        others = Counter(t.way for t in tasks if t.column == name.value and t.way is not Way.KILL)
        assert abs(others[Way.MOVE] - others[Way.DISK]) <= 3


@given(
    st.integers(0, 9), st.integers(1, 7), st.integers(1, 9), st.floats(0, 1), st.sets(st.sampled_from(Way), min_size=1)
)
def test_every_prompt_meets_every_cut_once_in_a_way_that_was_asked_for(
    seed: int, prompts: int, cuts: int, share: float, ways: set[Way]
) -> None:
    tasks = plan(seed, prompts, cuts, sorted(ways), share)
    assert Counter((t.prompt, t.column) for t in tasks) == Counter(
        (p, c) for p in range(prompts) for c in columns(cuts)
    )
    assert {t.way for t in tasks} <= ways
    if share == 0 and len(ways) > 1:
        assert all(t.way is not Way.KILL for t in tasks)
    if share > 0 and Way.KILL in ways:
        assert any(t.way is Way.KILL for t in tasks)


@given(st.sampled_from(columns(7)), st.integers(1, 300), st.integers(0, 99))
def test_a_cut_lies_inside_the_answer(column: str, length: int, seed: int) -> None:
    at = place(Task(0, column, Way.MOVE, 0), length, seed)
    assert 1 <= at <= max(length - 1, 1)
    if column == Place.FIRST:
        assert at == 1
    if column == Place.LAST_BUT_ONE:
        assert at == max(length - 1, 1)


def test_few_cuts_are_the_ones_that_should_not_be_missed() -> None:
    assert columns(1) == ("middle",)
    assert columns(2) == ("first", "middle")
    assert columns(4) == ("first", "early", "middle", "last-1")
    assert columns(6)[4:] == ("any-1", "any-2")
