"""A pool on a GPU, as the engine there uses it: VMM memory that outlives this process, and tensors over it.

Nothing of torch's allocator is in it: kernels and CUDA graphs see an address that is theirs until the process ends.
"""

import os
import secrets
from dataclasses import dataclass
from typing import Any

from ..session.errors import PoolError
from ..session.layout import PoolMeta, cuda_memory
from ..session.vram import create_device_pool, device_uuid, map_device_pool


@dataclass(slots=True)
class CudaMemory:
    """Descriptor and mapping; both stay as long as the engine lives."""

    fd: int
    size_bytes: int
    address: int
    device: Any
    memory: str
    identity: str

    @classmethod
    def create(cls, size_bytes: int, device: Any) -> "CudaMemory":
        """New memory, all zeros. Raises PoolError."""
        import torch

        # What torch keeps for itself was counted as free when the size of the KV cache was worked out.
        torch.cuda.empty_cache()
        index = _index(device)
        here = cuda_memory(device_uuid(index))
        pool = create_device_pool(size_bytes, index)
        made = cls(pool.fd, pool.size_bytes, pool.address, device, here, secrets.token_hex(16))
        try:
            made.tensor(0, 1)
        except Exception:
            # The engine needs this memory for a pool of its own making then.
            pool.mapping.close()
            os.close(pool.fd)
            raise
        return made

    @classmethod
    def adopt(cls, fd: int, meta: PoolMeta, device: Any) -> "CudaMemory":
        """Memory that is there, as it is; takes `fd` over when it returns. Raises PoolError."""
        index = _index(device)
        here = cuda_memory(device_uuid(index))
        if meta.memory != here:
            raise PoolError(f"it lies in {meta.memory}, and this engine runs on {here}")
        mapping = map_device_pool(fd, meta.size_bytes, index)
        adopted = cls(fd, meta.size_bytes, mapping.address, device, meta.memory, meta.identity)
        try:
            adopted.tensor(0, 1)
        except Exception:
            mapping.close()
            raise
        return adopted

    def tensor(self, offset: int, size_bytes: int) -> Any:
        """`size_bytes` of it as int8."""
        import torch

        return torch.as_tensor(_Span(self.address + offset, size_bytes), device=self.device)


class _Span:
    """Device memory as torch takes it from others."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _index(device: Any) -> int:
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)
