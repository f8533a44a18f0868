"""The compatibility key: any difference counts, and is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.key import REQUIRED, CompatibilityKey

KEY: dict[str, Any] = {name: f"a {name}" for name in REQUIRED}
values = st.none() | st.text(max_size=3) | st.integers(-2, 2) | st.sampled_from([0.5, 1.5])
keys = st.dictionaries(st.sampled_from("abcdef"), values).map(CompatibilityKey)


@given(keys, keys)
def test_a_difference_is_the_same_from_both_sides_and_empty_only_for_equal_keys(
    one: CompatibilityKey, other: CompatibilityKey
) -> None:
    assert one.difference(other) == other.difference(one)
    assert (one.difference(other) == ()) == (dict(one.fields) == dict(other.fields))
    assert one.difference(one) == ()


def test_a_field_that_only_one_side_has_is_a_difference_even_if_it_is_null() -> None:
    assert CompatibilityKey(KEY).difference(CompatibilityKey({**KEY, "lora": None})) == ("lora",)


def test_all_differing_fields_are_named_in_order() -> None:
    other = CompatibilityKey({**KEY, "model": "another", "dtype": "another"})
    assert CompatibilityKey(KEY).difference(other) == ("dtype", "model")


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("absent", [None, "", 0])
def test_a_required_field_that_says_nothing_is_missing(name: str, absent: object) -> None:
    with pytest.raises(ValueError, match=f"key: {name} missing"):
        CompatibilityKey.from_json({**KEY, name: absent})
    with pytest.raises(ValueError, match=f"key: {name} missing"):
        CompatibilityKey.from_json({k: v for k, v in KEY.items() if k != name})


@pytest.mark.parametrize("wrong", [None, [], "key", 7])
def test_only_an_object_is_a_key(wrong: object) -> None:
    with pytest.raises(ValueError, match=f"expected an object, got {type(wrong).__name__}"):
        CompatibilityKey.from_json(wrong)


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_values_must_be_plain(value: object) -> None:
    with pytest.raises(ValueError, match="key: lora must be plain"):
        CompatibilityKey.from_json({**KEY, "lora": value})


def test_a_key_survives_its_way_as_json_and_is_not_shared() -> None:
    body = {**KEY, "threads": 2, "lora": None}
    key = CompatibilityKey.from_json(body)
    assert key.to_json() == body
    body["model"] = "changed"
    assert key.fields["model"] == "a model"
