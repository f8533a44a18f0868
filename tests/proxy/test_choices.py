"""How a request for several answers falls into requests for one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.choices import count_of, split
from midstream.proxy.eligible import why_not_resumable
from midstream.proxy.request import wants_seed

PROMPTS: list[Any] = [None, "x", ["x"], [1, 2], [[1, 2]], ["a", "b"], ["a", "", "c"], [[1], [2, 3]], [[], [1]]]


def test_a_request_for_one_answer_stays_as_it_is() -> None:
    for body in ({}, {"n": 1}, {"n": None}, {"prompt": "x"}, {"prompt": [1, 2]}, {"prompt": ["x"]}, {"prompt": [[1]]}):
        (part,) = split(body, chat=False)
        assert part.body is body


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True, [2]])
def test_what_is_no_number_of_choices_is_left_to_the_engine(n: Any) -> None:
    body = {"n": n, "prompt": ["a", "b"]}
    assert count_of(body, chat=False) == 1
    assert split(body, chat=False)[0].body is body
    if n is not True:
        assert why_not_resumable(body) is not None


@pytest.mark.parametrize("prompt", [["a", 1], ["a", ["b"]], [[1], 2], [[1], ["b"]], [[True], [1]], [None, None]])
def test_what_are_no_prompts_is_left_to_the_engine(prompt: Any) -> None:
    body = {"prompt": prompt}
    assert split(body, chat=False)[0].body is body
    assert why_not_resumable(body) is not None


def test_a_chat_has_one_prompt_whatever_is_called_so() -> None:
    assert [part.prompt for part in split({"n": 2, "prompt": ["a", "b"], "messages": []}, chat=True)] == [0, 0]


@given(n=st.sampled_from([None, 1, 2, 5]), prompt=st.sampled_from(PROMPTS), seed=st.sampled_from([None, 0, -3, 7, "7"]))
def test_choices_are_numbered_prompt_by_prompt_and_seeded_by_their_place(n: Any, prompt: Any, seed: Any) -> None:
    body = {"n": n, "prompt": prompt, "seed": seed, "temperature": 1}
    parts = split(body, chat=False)
    assert len(parts) == count_of(body, chat=False)
    assert [part.index for part in parts] == list(range(len(parts)))
    for part in parts:
        assert part.prompt == part.index // (n or 1)
        assert why_not_resumable(part.body) is None
        assert split(part.body, chat=False)[0].body is part.body
        wanted = seed + part.index % (n or 1) if isinstance(seed, int) else seed
        assert part.body["seed"] == wanted
        assert part.body["temperature"] == 1
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    if several:
        assert [part.body["prompt"][0] for part in parts[:: n or 1]] == prompt
    else:
        assert all(part.body["prompt"] == prompt for part in parts)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_request_without_a_seed_has_none_in_any_of_its_choices(seed: Any) -> None:
    parts = split({"n": 3, "prompt": ["a", "b"], "seed": seed}, chat=False)
    assert [part.body["seed"] for part in parts] == [seed] * 6
    assert all(wants_seed(part.body) for part in parts)
