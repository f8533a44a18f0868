"""Views of every kind that the engines give their layers become blocks at the right bytes, and others are refused."""

from itertools import product
from math import prod

import pytest

from midstream.adapters.pool_layout import layout_of, meaning_of
from midstream.session.errors import PoolError
from midstream.session.layout import Plane
from support.views import View

BASE = 1 << 20
BLOCKS, TOKENS, HEADS, SIZE = 7, 16, 2, 8
LAYER_BYTES = BLOCKS * 2 * TOKENS * HEADS * SIZE * 2


def halves_first(address: int) -> View:
    """Keys of all blocks, then values of all blocks."""
    return View((2, BLOCKS, TOKENS, HEADS, SIZE), address, item_bytes=2)


def blocks_first(address: int, order: str = "NHD") -> View:
    """FlashAttention of 0.25 on a GPU: keys and values of a block side by side, tokens or heads outermost in each."""
    shape = (BLOCKS, 2, TOKENS, HEADS, SIZE)
    inner = TOKENS * HEADS * SIZE
    by_order = {"NHD": (HEADS * SIZE, SIZE, 1), "HND": (SIZE, TOKENS * SIZE, 1)}[order]
    return View(shape, address, (2 * inner, inner, *by_order), 2)


def bytes_of_block(view: View, block: int) -> set[int]:
    """Every byte that a value of the block has, by the view's own arithmetic."""
    axis = 1 if view.shape[0] == 2 else 0
    parts = view.shape[axis] // BLOCKS
    found = set()
    for index in product(*(range(length) for length in view.shape)):
        if index[axis] // parts == block:
            strides = view.stride()
            assert isinstance(strides, tuple)
            start = view.data_ptr() - BASE + 2 * sum(i * s for i, s in zip(index, strides, strict=True))
            found |= {start, start + 1}
    return found


@pytest.mark.parametrize(
    ("view", "planes"),
    [
        pytest.param(blocks_first(BASE), 1, id="blocks first"),
        pytest.param(blocks_first(BASE, "HND"), 1, id="blocks first, heads outermost"),
        pytest.param(halves_first(BASE), 2, id="halves first"),
        pytest.param(View((BLOCKS * 4, 2, 4, HEADS, SIZE), BASE, item_bytes=2), 1, id="blocks in four parts"),
        pytest.param(View((2, BLOCKS * 4, 4, HEADS, SIZE), BASE, item_bytes=2), 2, id="halves, blocks in four parts"),
    ],
)
def test_a_block_has_all_its_values_and_no_others(view: View, planes: int) -> None:
    layout = layout_of({"l0": view}, BASE, BLOCKS, TOKENS)
    assert len(layout.planes) == planes
    assert layout.block_bytes * BLOCKS == 2 * prod(view.shape)
    for block in range(BLOCKS):
        covered = {byte for start, end in layout.spans(block) for byte in range(start, end)}
        assert covered == bytes_of_block(view, block)


def test_layers_in_buffers_of_their_own_are_planes_in_the_order_of_their_addresses() -> None:
    caches = {f"l{i}": blocks_first(BASE + i * LAYER_BYTES) for i in (2, 0, 1)}
    layout = layout_of(caches, BASE, BLOCKS, TOKENS)
    assert [plane.offset for plane in layout.planes] == [0, LAYER_BYTES, 2 * LAYER_BYTES]
    assert {plane.stride for plane in layout.planes} == {LAYER_BYTES // BLOCKS}


def test_layers_that_share_a_cache_count_once() -> None:
    caches = {"l0": blocks_first(BASE), "l1": blocks_first(BASE)}
    assert len(layout_of(caches, BASE, BLOCKS, TOKENS).planes) == 1


def test_layers_packed_into_each_block_are_one_plane() -> None:
    page = 2 * TOKENS * HEADS * SIZE
    strides = (3 * page, page // 2, HEADS * SIZE, SIZE, 1)
    shape = (BLOCKS, 2, TOKENS, HEADS, SIZE)
    caches = {f"l{i}": View(shape, BASE + i * page * 2, strides, 2) for i in range(3)}
    assert layout_of(caches, BASE, BLOCKS, TOKENS).planes == (Plane(0, 6 * page, 6 * page),)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(View((BLOCKS + 1, 2, 64), BASE), id="another number of blocks"),
        pytest.param(View((64, BLOCKS, 64), BASE), id="blocks within something else"),
        pytest.param(View((BLOCKS, 2, 64), BASE, (256, 128, 1)), id="gaps in a block"),
        pytest.param(View((BLOCKS * 2, 64), BASE, (128, 1)), id="gaps between the parts of a block"),
        pytest.param(View((BLOCKS,), BASE - 8), id="outside of the pool"),
    ],
)
def test_what_else_a_view_looks_like_is_refused(view: View) -> None:
    with pytest.raises(PoolError):
        layout_of({"l0": view}, BASE, BLOCKS, TOKENS)


def test_with_two_blocks_nobody_can_tell_them_from_keys_and_values() -> None:
    with pytest.raises(PoolError, match="give it more"):
        layout_of({"l0": View((2, 2, 64), BASE)}, BASE, 2, TOKENS)


def test_blocks_of_one_size_that_are_arranged_otherwise_have_another_meaning() -> None:
    meanings = {
        meaning_of({"l0": view}, BLOCKS)
        for view in (
            blocks_first(BASE),
            blocks_first(BASE, "HND"),
            halves_first(BASE),
            View((BLOCKS, 2, TOKENS, HEADS, SIZE), BASE, item_bytes=2, dtype="torch.float16"),
            View((BLOCKS * 2, 2, TOKENS // 2, HEADS, SIZE), BASE, item_bytes=2),
        )
    }
    assert len(meanings) == 5
    assert meaning_of({"l1": blocks_first(BASE)}, BLOCKS) not in meanings


def test_the_meaning_of_a_block_does_not_depend_on_how_many_there_are_or_where() -> None:
    more = View((BLOCKS + 3, 2, TOKENS, HEADS, SIZE), 0, item_bytes=2)
    assert meaning_of({"l0": more}, BLOCKS + 3) == meaning_of({"l0": blocks_first(BASE)}, BLOCKS)
    wider = View((2, BLOCKS + 3, TOKENS, HEADS, SIZE), 0, item_bytes=2)
    assert meaning_of({"l0": wider}, BLOCKS + 3) == meaning_of({"l0": halves_first(BASE)}, BLOCKS)
