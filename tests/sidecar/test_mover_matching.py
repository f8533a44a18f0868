"""KV is used only where everything is equal, and what is not is named."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.ids import SessionId
from midstream.sidecar.mover.matching import SessionKv, check_match
from midstream.sidecar.mover.protocol import MoverError, Reason

NEEDED = SessionKv(SessionId("1" * 32), {"model": "m", "lora": None}, ("f" * 32, 16, 4096), (5, "a" * 32), [1, 2, 3], 7)


def test_the_same_and_more_of_the_same_match() -> None:
    check_match(NEEDED, NEEDED)
    check_match(replace(NEEDED, outputs=(1, 2, 3, 4), kv_len=8), NEEDED)


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"session": SessionId("2" * 32)}, Reason.SESSION, "2222"),
        ({"key": {"model": "m", "lora": "x"}}, Reason.KEY, "differ in lora"),
        ({"key": {"model": "m"}}, Reason.KEY, "differ in lora"),
        ({"key": {"model": "m", "lora": None, "dtype": "bf16"}}, Reason.KEY, "differ in dtype"),
        ({"key": {}}, Reason.KEY, "differ in lora, model"),
        ({"ranks": 2}, Reason.RANKS, "parts of 2 ranks, its new engine has 1"),
        ({"block_form": ("e" * 32, 16, 4096)}, Reason.LAYOUT, "laid out differently"),
        ({"block_form": ("f" * 32, 8, 4096)}, Reason.LAYOUT, "laid out differently"),
        ({"block_form": ("f" * 32, 16, 2048)}, Reason.LAYOUT, "laid out differently"),
        ({"prompt": (5, "b" * 32)}, Reason.PROMPT, "other tokens"),
        ({"prompt": (6, "a" * 32)}, Reason.PROMPT, "other tokens"),
        ({"outputs": [1, 2]}, Reason.TOKENS, "not what was journaled"),
        ({"outputs": [1, 9, 3]}, Reason.TOKENS, "not what was journaled"),
        ({"kv_len": 6}, Reason.INCOMPLETE, "6 positions, 7"),
    ],
)
def test_whatever_differs_is_named(changes: dict[str, Any], reason: Reason, text: str) -> None:
    with pytest.raises(MoverError, match=text) as caught:
        check_match(replace(NEEDED, **changes), NEEDED)
    assert caught.value.reason is reason


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=5))
def test_a_journal_serves_exactly_its_prefixes(journal: list[int], wanted: list[int]) -> None:
    offered = replace(NEEDED, outputs=journal)
    if wanted == journal[: len(wanted)]:
        check_match(offered, replace(NEEDED, outputs=wanted))
    else:
        with pytest.raises(MoverError):
            check_match(offered, replace(NEEDED, outputs=wanted))
