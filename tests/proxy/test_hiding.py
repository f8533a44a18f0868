"""Hiding of token ids in raw bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.dialects.hiding import Hiding, hide_ids, hide_one_list

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(['"token_ids":[1]', '\\"token_ids":[1]', 'token_ids":[1]', '","token_ids":[1,2],"', "\\"]),
)
IDS = st.lists(st.integers(0, 1 << 32), max_size=4)


@given(TEXTS, TEXTS, IDS, IDS, st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_only_ids_change_whatever_the_texts_are(
    text: str, key: str, ids: list[int], prompt: list[int], separators: tuple[str, str], ascii_only: bool
) -> None:
    def dump(said: list[int] | None, asked: list[int] | None) -> bytes:
        choice = {"text": text, "token_ids": said, "top": {"x" + key: -0.5}, "prompt_token_ids": asked, "end": 1}
        return json.dumps(choice, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")

    assert hide_ids(dump(ids, prompt), Hiding.NULL) == dump(None, None)
    assert hide_one_list(dump(ids, None), Hiding.NULL) == dump(None, None)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("order", [("token_ids", "a"), ("a", "token_ids"), ("token_ids",), ("a", "token_ids", "b")])
def test_absent_ids_leave_valid_json_without_the_key(order: tuple[str, ...], separators: tuple[str, str]) -> None:
    body = {name: [1, 2] if name == "token_ids" else "x" for name in order}
    without = {name: value for name, value in body.items() if name != "token_ids"}
    raw = json.dumps(body, separators=separators).encode()
    assert hide_ids(raw, Hiding.ABSENT) == json.dumps(without, separators=separators).encode()


def test_a_key_that_only_ends_like_one_of_ids_stays() -> None:
    raw = json.dumps({'a"token_ids': [1], "x_token_ids": [2], "prompt_token_ids": None}).encode()
    assert hide_ids(raw, Hiding.NULL) == raw
