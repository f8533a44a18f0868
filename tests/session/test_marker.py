"""The marker: what a sidecar wrote is read back, and nothing else is read at all."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.ids import SessionId
from midstream.session.marker import FIELD, NAME, KvSource, Marker, Resume, with_marker, without_marker

S = SessionId("0123456789abcdef" * 2)
u32 = st.integers(0, 2**32 - 1)
resumes = st.builds(
    Resume,
    outputs=st.lists(u32, max_size=8).map(tuple),
    kv=st.sampled_from(KvSource),
    prompt_hash=st.text("0123456789abcdef", min_size=32, max_size=32),
    finish=st.sampled_from(["", "stop", "length"]),
)
markers = st.builds(
    Marker,
    session=st.text("0123456789abcdef", min_size=32, max_size=32).map(SessionId),
    generation=st.integers(1, 2**32 - 1),
    resume=st.none() | resumes,
    seed=st.none() | u32,
)


def body(**changes: Any) -> dict[str, Any]:
    return {**Marker(S, 2, Resume((1, 2), KvSource.HELD, "0" * 32)).to_json(), **changes}


def resume(**changes: Any) -> dict[str, Any]:
    return body(resume={"outputs": [1], "kv": "held", "prompt_hash": "0" * 32, "finish": "", **changes})


@given(markers)
def test_a_marker_survives_its_way_as_json(marker: Marker) -> None:
    assert Marker.from_json(json.loads(json.dumps(marker.to_json()))) == marker


@given(markers, st.dictionaries(st.text(max_size=8), st.integers(), max_size=4))
def test_what_a_client_puts_in_its_place_is_gone(marker: Marker, asked: dict[str, Any]) -> None:
    forged = {**asked, FIELD: {NAME: {"v": 1, "session": "f" * 32}, "do_remote_prefill": True}}
    marked = with_marker(forged, marker)
    assert marked[FIELD] == {NAME: marker.to_json()}
    assert without_marker(marked) == {k: v for k, v in asked.items() if k != FIELD}


def test_a_body_is_never_changed_where_it_stands() -> None:
    asked: dict[str, Any] = {"model": "m", FIELD: {"a": 1}}
    with_marker(asked, Marker(S, 1))
    without_marker(asked)
    assert asked == {"model": "m", FIELD: {"a": 1}}


def test_a_first_marker_has_no_resume_record() -> None:
    assert Marker(S, 1).to_json() == {"v": 1, "session": S, "generation": 1}
    assert Marker.from_json(Marker(S, 1).to_json()).resume is None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "marker",
        {},
        body(v=2),
        body(v="1"),
        body(session="short"),
        body(session=7),
        body(session=None),
        body(session="0123456789ABCDEF" * 2),
        body(generation=0),
        body(generation=-1),
        body(generation=2**32),
        body(generation=True),
        body(generation=1.0),
        body(generation="1"),
        body(generation=math.inf),
        body(generation=math.nan),
        body(seed=-1),
        body(seed=2**32),
        body(seed=True),
        body(seed="1"),
        body(resume=[]),
        body(resume="held"),
        body(resume={}),
        resume(outputs="12"),
        resume(outputs=[1.5]),
        resume(outputs=[math.inf]),
        resume(outputs=[True]),
        resume(outputs=[-1]),
        resume(outputs=[2**32]),
        resume(outputs=["1"]),
        resume(outputs=None),
        resume(outputs={"1": 1}),
        resume(kv="gpu"),
        resume(kv=None),
        resume(finish="abort"),
        resume(finish=None),
    ],
)
def test_anything_else_is_a_value_error_and_nothing_worse(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Marker.from_json(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["v", "session", "generation", "resume", "seed"]), json_values)
def test_no_json_value_in_any_field_raises_anything_but_a_value_error(name: str, value: object) -> None:
    try:
        marker = Marker.from_json(body(**{name: value}))
    except ValueError:
        return
    assert Marker.from_json(marker.to_json()) == marker


@given(st.sampled_from(["outputs", "kv", "prompt_hash", "finish"]), json_values)
def test_nor_in_any_field_of_the_resume_record(name: str, value: object) -> None:
    try:
        marker = Marker.from_json(resume(**{name: value}))
    except ValueError:
        return
    assert Marker.from_json(marker.to_json()) == marker
