"""Keys and values in memory that outlives the process: the pool, and the cache that a session sees of it.

Owns the placement. The pool is one flat buffer; layer l has two planes (keys, values), each [tokens, kv_heads,
head_dim] with the tokens of block b at [b * block_tokens, ...). Because a session's blocks are one run, its cache is
strided views of the planes: new keys and values are written straight to where the holder keeps them, and attention
reads them from there. Invariant: a cache never writes outside its run.

Does not know which blocks are free (extents.py) nor who keeps the memory.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...session.errors import EngineError
from ...session.layout import Plane, PoolLayout
from .extents import Run


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a model keeps of one position: the same for all layers."""

    layer_count: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def plane_token_bytes(self) -> int:
        """Bytes of one position in one plane."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one position, all layers together."""
        return 2 * self.layer_count * self.plane_token_bytes

    def layout(self, block_count: int, block_tokens: int) -> PoolLayout:
        """The pool layout of `block_count` blocks: planes one after the other, in the order of layers."""
        block_bytes = block_tokens * self.plane_token_bytes
        planes = tuple(
            Plane(index * block_count * block_bytes, block_bytes, block_bytes) for index in range(2 * self.layer_count)
        )
        return PoolLayout(block_count, block_tokens, planes)


def observed_shape(cache: DynamicCache) -> KvShape:
    """The KvShape of a model, taken from a cache that one forward has filled.

    Measured rather than read from the configuration, whose names differ between models. EngineError for a model whose
    layers do not all keep plain keys and values of one shape.
    """
    kinds = {type(layer).__name__ for layer in cache.layers}
    if kinds != {DynamicLayer.__name__}:
        raise EngineError(
            f"the model's cache has layers of kind {', '.join(sorted(kinds))}; the embedded engine serves models with "
            "full attention in every layer"
        )
    shapes = {
        (layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype, tuple(layer.values.shape))
        for layer in cache.layers
    }
    heads, dim, dtype, values = next(iter(shapes))
    if len(shapes) != 1 or values[1] != heads or values[3] != dim:
        raise EngineError(
            "the model keeps keys and values of different shapes; the embedded engine serves models where all are equal"
        )
    return KvShape(len(cache.layers), heads, dim, dtype)


class KvPool:
    """The tensors over a pool's memory."""

    def __init__(self, shape: KvShape, layout: PoolLayout, memory: torch.Tensor) -> None:
        self.shape = shape
        self.layout = layout
        tokens = layout.block_count * layout.block_tokens
        self._planes = memory.view(shape.dtype).view(shape.layer_count, 2, tokens, shape.kv_heads, shape.head_dim)

    @classmethod
    def over(cls, mapping: mmap.mmap, shape: KvShape, layout: PoolLayout) -> "KvPool":
        """A pool over mapped host memory; nothing in it is touched."""
        return cls(shape, layout, torch.frombuffer(mapping, dtype=torch.uint8, count=layout.end))

    @classmethod
    def on_device(cls, device: torch.device, shape: KvShape, layout: PoolLayout) -> "KvPool":
        """A pool of the process's own, in a device's memory: it dies with the process."""
        return cls(shape, layout, torch.zeros(layout.end, dtype=torch.uint8, device=device))

    def cache(self, run: Run) -> "RunCache":
        """The cache of the session that owns `run`; what the run holds already stays."""
        first = run.start * self.layout.block_tokens
        last = run.end * self.layout.block_tokens
        # [tokens, heads, dim] -> [1, heads, tokens, dim]: a view, the layout that attention wants.
        views = self._planes[:, :, first:last].permute(0, 1, 3, 2, 4).unsqueeze(2)
        return RunCache([_RunLayer(views[layer, 0], views[layer, 1]) for layer in range(self.shape.layer_count)])


class RunCache(Cache):
    """A Transformers cache over one run of blocks."""

    def __init__(self, layers: Sequence["_RunLayer"]) -> None:
        super().__init__(layers=list(layers))

    def cut(self, length: int) -> None:
        """Go on from position `length`; what lies behind it is overwritten next."""
        for layer in self.layers:
            layer.length = length


class _RunLayer(DynamicLayer):
    """One layer: writes at `length`, shows everything before it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            raise EngineError(f"position {end} is beyond the session's run of {self.keys.shape[-2]} positions")
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self, *_args: Any) -> int:
        return self.length
