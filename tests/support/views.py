"""Views of a KV cache as an engine gives them to its layers: shapes, strides, addresses; no tensor library."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


class View:
    """A view of `item_bytes` values at `address`; contiguous unless strides (in values) are given."""

    def __init__(
        self,
        shape: Sequence[int],
        address: int = 0,
        strides: Sequence[int] | None = None,
        item_bytes: int = 1,
        dtype: str = "torch.int8",
    ) -> None:
        self.shape = tuple(shape)
        dense = (1, *accumulate(reversed(self.shape[1:]), mul))
        self._strides = tuple(reversed(dense)) if strides is None else tuple(strides)
        self._address = address
        self._item_bytes = item_bytes
        self.dtype = dtype

    def stride(self, dimension: int | None = None) -> "int | tuple[int, ...]":
        """Values from one index to the next."""
        return self._strides if dimension is None else self._strides[dimension]

    def element_size(self) -> int:
        """Bytes of a value."""
        return self._item_bytes

    def data_ptr(self) -> int:
        """Where the first value lies."""
        return self._address

    def numel(self) -> int:
        """How many values there are."""
        return [*accumulate(self.shape, mul)][-1] if self.shape else 1

    def __getitem__(self, index: int) -> "View":
        address = self._address + index * self._strides[0] * self._item_bytes
        return View(self.shape[1:], address, self._strides[1:], self._item_bytes, self.dtype)
