"""What requests begin with."""

import time

from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.gateway.beginning import BEGINNING_CHARS, beginning_of

LONG = "word " * BEGINNING_CHARS


def chat(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


@given(st.text(max_size=200), st.text(max_size=200))
def test_requests_that_begin_alike_are_alike_whatever_follows(a: str, b: str) -> None:
    assert beginning_of({"prompt": LONG + a}) == beginning_of({"prompt": LONG + b, "max_tokens": 3}) != b""
    assert beginning_of(chat(LONG, a)) == beginning_of(chat(LONG, b))


def test_what_begins_otherwise_is_not_alike() -> None:
    different = [
        {"prompt": LONG},
        {"prompt": "x" + LONG},
        {"system": "x", "prompt": LONG},
        {"cache_salt": "x", "prompt": LONG},
        {"prompt": list(range(2000))},
        {"prompt": list(range(1, 2000))},
        chat(LONG),
        chat("x", LONG),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    ]
    assert len({beginning_of(body) for body in different}) == len(different)


def test_short_requests_have_none() -> None:
    assert beginning_of({"prompt": "x" * (BEGINNING_CHARS - 1)}) == b""
    assert beginning_of({"prompt": [1, 2, 3]}) == beginning_of({}) == beginning_of({"prompt": None}) == b""


def test_a_large_request_costs_no_more_than_a_small_one() -> None:
    body = {"messages": [{"role": "user", "content": "x" * (32 << 20)}, *chat("y" * 1000)["messages"]]}  # type: ignore[misc]
    began_s = time.perf_counter()
    for _ in range(100):
        beginning_of(body)
    assert time.perf_counter() - began_s < 0.5


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_anything_may_be_asked(prompt: object) -> None:
    assert isinstance(beginning_of({"prompt": prompt}), bytes)
