"""Layouts: every block inside the pool, no byte in two blocks, JSON both ways."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.errors import PoolError
from midstream.session.layout import HOST, Plane, PoolLayout, PoolMeta, cuda_memory

ints = st.integers(min_value=0, max_value=40)


@st.composite
def good_layouts(draw: st.DrawFn) -> PoolLayout:
    """Layouts made of groups of planes: each group interleaves with one stride, groups follow each other."""
    block_count = draw(st.integers(1, 6))
    planes = []
    start = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
        stride = sum(sizes) + sum(gaps)
        offset = start
        for size, gap in zip(sizes, gaps, strict=True):
            planes.append(Plane(offset, stride, size))
            offset += size + gap
        start += stride * block_count
    return PoolLayout(block_count, draw(st.integers(1, 64)), tuple(draw(st.permutations(planes))))


@given(good_layouts())
def test_no_byte_belongs_to_two_blocks_and_all_lie_inside(layout: PoolLayout) -> None:
    seen: set[int] = set()
    for block in range(layout.block_count):
        spans = layout.spans(block)
        assert sum(end - start for start, end in spans) == layout.block_bytes
        for start, end in spans:
            assert 0 <= start < end <= layout.end
            fresh = set(range(start, end))
            assert not fresh & seen
            seen |= fresh


@given(st.integers(1, 5), st.lists(st.builds(Plane, ints, ints, ints), min_size=1, max_size=4))
def test_a_layout_that_is_accepted_never_shares_bytes(block_count: int, planes: list[Plane]) -> None:
    try:
        layout = PoolLayout(block_count, 1, tuple(planes))
    except PoolError:
        return
    used = list(itertools.chain.from_iterable(range(*span) for b in range(block_count) for span in layout.spans(b)))
    assert len(used) == len(set(used))


@given(good_layouts())
def test_json_comes_back_as_it_was(layout: PoolLayout) -> None:
    assert PoolLayout.from_json(layout.to_json(), layout.end) == layout
    meta = PoolMeta(layout.end, layout, layout.fingerprint(), {"pid": 1})
    assert PoolMeta.from_json(meta.to_json()) == meta
    with pytest.raises(PoolError, match="not that of the layout"):
        PoolMeta.from_json(meta.to_json() | {"fingerprint": "0" * 32})


GPU = "GPU-7a0c8b8f-1d3e-4f6a-9b2c-0123456789ab"


def test_a_meta_says_on_which_gpu_its_pool_lies_and_one_that_says_nothing_lies_in_host_memory() -> None:
    layout = PoolLayout(2, 4, (Plane(0, 8, 8),))
    host = PoolMeta(16, layout, layout.fingerprint(), {})
    assert (host.memory, host.gpu_uuid) == (HOST, None)
    told = host.to_json()
    del told["memory"]
    assert PoolMeta.from_json(told) == host
    device = PoolMeta(16, layout, layout.fingerprint(), {}, cuda_memory(GPU), "0" * 32)
    assert device.gpu_uuid == GPU
    assert PoolMeta.from_json(device.to_json()) == device


@pytest.mark.parametrize(
    "words",
    [
        {"memory": "cuda:0"},
        {"memory": GPU},
        {"memory": "cuda:"},
        {"memory": "disk"},
        {"memory": ""},
        {"memory": 1},
        {"memory": cuda_memory(GPU) + "\n"},
        {"identity": ""},
        {"identity": "x" * 32},
        {"identity": None},
    ],
)
def test_a_device_pool_names_a_gpu_and_an_identity(words: dict[str, Any]) -> None:
    layout = PoolLayout(2, 4, (Plane(0, 8, 8),))
    good = PoolMeta(16, layout, layout.fingerprint(), {}, cuda_memory(GPU), "0" * 32).to_json()
    with pytest.raises(PoolError, match=r"memory|identity"):
        PoolMeta.from_json(good | words)


@given(good_layouts())
def test_a_pool_one_byte_too_small_is_refused(layout: PoolLayout) -> None:
    with pytest.raises(PoolError, match="but the pool has"):
        PoolLayout.from_json(layout.to_json(), layout.end - 1)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=4))
)
def test_whatever_is_in_the_json_only_a_pool_error_comes_of_it(value: Any) -> None:
    good = PoolLayout(2, 4, (Plane(0, 8, 8),)).to_json()
    for body in (value, good | {"planes": value}, good | {"planes": [value]}, good | {"block_count": value}):
        with pytest.raises(PoolError):
            PoolLayout.from_json(body, 15)


@pytest.mark.parametrize(
    ("planes", "message"),
    [
        ((), "0 planes"),
        ((Plane(0, 8, 0),), "not be empty"),
        ((Plane(0, 7, 8),), "would overlap"),
        ((Plane(0, 8, 8), Plane(12, 8, 4)), "share bytes"),
        ((Plane(0, 16, 8), Plane(8, 17, 8)), "share bytes"),
        (tuple(Plane(i * 100, 8, 8) for i in range(1025)), "1025 planes"),
    ],
)
def test_layouts_that_cannot_be_are_named(planes: tuple[Plane, ...], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        PoolLayout(3, 4, planes)


def test_a_block_outside_the_pool_is_refused() -> None:
    layout = PoolLayout(2, 4, (Plane(0, 8, 8),))
    for block in (-1, 2):
        with pytest.raises(PoolError, match="not in a pool of 2"):
            layout.spans(block)


def test_the_fingerprint_says_what_a_block_is_made_of_and_not_where_it_lies() -> None:
    one = PoolLayout(2, 4, (Plane(0, 8, 8), Plane(16, 8, 8)))
    larger = PoolLayout(9, 4, (Plane(0, 8, 8), Plane(72, 8, 8)))
    assert one.fingerprint() == larger.fingerprint()
    assert one.fingerprint() != PoolLayout(2, 8, one.planes).fingerprint()
    assert one.fingerprint() != PoolLayout(2, 4, one.planes[:1]).fingerprint()
