"""Where the blocks lie in a pool, and what their bytes mean, from the views of it that the engine gives its layers.

Pure but for reading shapes, strides and addresses. Views come as `[blocks, ...]`, or as `[2, blocks, ...]` where keys
and values of a layer lie apart (two planes then); kernels may split a block into parts that follow each other, so that
there is a multiple of the blocks. Whatever else a view looks like is refused, never guessed.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from ..session.errors import PoolError
from ..session.layout import Plane, PoolLayout

HALVES = 2


def layout_of(kv_caches: Mapping[str, Any], base: int, block_count: int, block_tokens: int) -> PoolLayout:
    """Where the blocks lie, from the layers' views over the pool at address `base`."""
    planes = {
        _plane(name, view, base, block_count)
        for name, cache in kv_caches.items()
        for view in _by_block(name, cache, block_count)
    }
    return PoolLayout(block_count, block_tokens, tuple(_merged(sorted(planes, key=lambda p: p.offset))))


def meaning_of(kv_caches: Mapping[str, Any], block_count: int) -> str:
    """16 hex digits that say how a block's values are arranged: order of dimensions and type, layer by layer.

    Two backends may put the same number of bytes into a block and mean something else by them.
    """
    forms = []
    for name, cache in sorted(kv_caches.items()):
        views = _by_block(name, cache, block_count)
        parts = views[0].shape[0] // block_count
        forms.append((name, len(views), parts, *((tuple(v.shape[1:]), v.stride()[1:], str(v.dtype)) for v in views)))
    return hashlib.blake2b(repr(forms).encode(), digest_size=8).hexdigest()


def _by_block(name: str, cache: Any, block_count: int) -> list[Any]:
    """The cache of a layer as views whose first dimension goes over blocks."""
    shape = tuple(cache.shape)
    halved = len(shape) > 1 and shape[0] == HALVES and shape[1] >= block_count and shape[1] % block_count == 0
    whole = shape[0] >= block_count and shape[0] % block_count == 0
    if whole and halved:
        raise PoolError(f"layer {name}: of shape {shape} either dimension may be the blocks; give it more of them")
    if halved:
        return [cache[half] for half in range(HALVES)]
    if whole:
        return [cache]
    raise PoolError(f"layer {name}: shape {shape} is not one of {block_count} blocks; this attention is not supported")


def _plane(name: str, view: Any, base: int, block_count: int) -> Plane:
    parts = view.shape[0] // block_count
    item = view.element_size()
    size = view[0].numel() * item
    # A block's values must fill one span: sorted by stride, each dimension begins where the smaller ones end.
    dense = 1
    for stride, length in sorted(zip(view.stride()[1:], view.shape[1:], strict=True)):
        if length > 1 and stride != dense:
            raise PoolError(f"layer {name}: a block is not contiguous (strides {view.stride()})")
        dense *= length
    stride = view.stride(0) * item
    if parts > 1 and stride != size:
        raise PoolError(f"layer {name}: {parts} parts of a block are not contiguous")
    return Plane(view.data_ptr() - base, stride * parts, size * parts)


def _merged(planes: list[Plane]) -> list[Plane]:
    """Neighbours with one stride are one plane: fewer, larger copies."""
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if last is not None and last.stride == plane.stride and last.offset + last.size_bytes == plane.offset:
            merged[-1] = Plane(last.offset, last.stride, last.size_bytes + plane.size_bytes)
        else:
            merged.append(plane)
    return merged
