"""What members say of themselves, and their ids."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.fleet.record import (
    LEASE_S_MAX,
    LEASE_S_MIN,
    Load,
    MemberId,
    Readiness,
    Record,
    Role,
    decode,
    encode,
    lease_s_of,
    member_id,
    member_name,
)

NODE = Record("node-a", Role.NODE, "http://10.0.0.7:8800")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
records = st.builds(
    Record,
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
    role=st.sampled_from(Role),
    url=st.just("https://[fd00::7]:1/p"),
    readiness=st.sampled_from(Readiness),
    load=st.sampled_from(Load),
    models=st.lists(texts.filter(bool), max_size=5).map(tuple),
    keys=st.lists(texts.filter(bool), max_size=5).map(tuple),
    slot_count=st.integers(0, 1 << 24),
    version=texts,
    formerly=st.none() | st.just(MemberId("node-a.10s.0123456789abcdef")),
)


@given(records)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode(encode(record)) == record


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda c: st.lists(c) | st.dictionaries(texts, c))
)
def test_what_is_no_record_is_refused_and_nothing_else_happens(tree: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(json.dumps(tree))


@given(
    st.sampled_from(sorted(json.loads(encode(NODE)))), st.none() | st.integers() | st.lists(st.integers(), min_size=1)
)
def test_a_field_of_another_kind_is_refused(field: str, value: object) -> None:
    body = json.loads(encode(NODE))
    is_fit = (field == "slot_count" and isinstance(value, int) and 0 <= value <= 1 << 24) or (
        (field == "formerly" and value is None) or (field == "v" and value == 1)
    )
    body[field] = value
    if is_fit:
        decode(json.dumps(body))
    else:
        with pytest.raises(ValueError, match=r"."):
            decode(json.dumps(body))


def test_a_record_of_another_version_is_refused_and_said_to_be_one() -> None:
    body = {**json.loads(encode(NODE)), "v": 2}
    with pytest.raises(ValueError, match="unknown version; expected 1"):
        decode(json.dumps(body))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "Node"}, "lower-case"),
        ({"name": "a.b"}, "lower-case"),
        ({"name": "-a"}, "lower-case"),
        ({"name": "a" * 64}, "1 to 63"),
        ({"url": "10.0.0.7:8800"}, "expected something like http://"),
        ({"url": "ftp://a"}, "expected something like http://"),
        ({"url": "http://" + "a" * 600}, "expected something like http://"),
        ({"models": ("",)}, "models: expected at most 64 texts"),
        ({"keys": ("k",) * 65}, "keys: expected at most 64 texts"),
        ({"version": "z" * 513}, "version: expected at most 512"),
        ({"slot_count": -1}, "slot_count -1"),
        ({"formerly": "node-a"}, "expected <name>.<seconds>s"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(NODE, **changes)  # type: ignore[arg-type]


def test_a_member_id_says_how_long_its_lease_is() -> None:
    made = member_id("node-a", 10, "0123456789abcdef")
    assert made == "node-a.10s.0123456789abcdef"
    assert lease_s_of(made) == 10
    assert lease_s_of(member_id("9", LEASE_S_MIN, "f" * 16)) == LEASE_S_MIN
    for wrong in (
        "node-a.10s.0123456789abcde",
        "node-a.10.0123456789abcdef",
        "node-a.010s.0123456789abcdef",
        f"node-a.{LEASE_S_MAX + 1}s.0123456789abcdef",
        "node-a.2s.0123456789abcdef",
        ".10s.0123456789abcdef",
        "node-a.10s.0123456789ABCDEF",
        "node-a.10s.0123456789abcdef\n",
        "",
    ):
        with pytest.raises(ValueError, match="expected <name>"):
            lease_s_of(wrong)
    with pytest.raises(ValueError, match="lower-case"):
        member_name("node_a")
