"""A pool in host memory, as the engine on a CPU uses it: a sealed memfd and tensors over it."""

import mmap
from dataclasses import dataclass
from typing import Any

from ..session.errors import PoolError
from ..session.held import create_host_pool, map_pool
from ..session.layout import HOST, PoolMeta


@dataclass(slots=True)
class HostMemory:
    """Descriptor and mapping; both stay open as long as the engine lives."""

    fd: int
    size_bytes: int
    mapping: mmap.mmap
    memory: str = HOST
    identity: str = ""

    @classmethod
    def create(cls, size_bytes: int, device: Any) -> "HostMemory":
        """New memory, all zeros. Raises PoolError."""
        fd = create_host_pool(size_bytes)
        return cls(fd, size_bytes, map_pool(fd, size_bytes))

    @classmethod
    def adopt(cls, fd: int, meta: PoolMeta, device: Any) -> "HostMemory":
        """Memory that is there, as it is; takes `fd` over when it returns. Raises PoolError."""
        if meta.memory != HOST:
            raise PoolError(f"it lies in {meta.memory}, and this engine runs on a CPU")
        return cls(fd, meta.size_bytes, map_pool(fd, meta.size_bytes))

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.tensor(0, 1).data_ptr())

    def tensor(self, offset: int, size_bytes: int) -> Any:
        """`size_bytes` of it as int8."""
        import torch

        return torch.frombuffer(self.mapping, dtype=torch.int8, count=size_bytes, offset=offset)
