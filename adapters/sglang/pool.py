"""Placement of the KV pool: in memory that the holder keeps, or the pool of the epoch before.

Owns the one pool of this process. Keys and values of all layers lie in it, one tensor after the other, where SGLang's
own function asks for them. Nothing here ever zeroes a pool that was adopted, and none is adopted while a process of the
engine that had it is left, nor by an engine whose own sessions cannot go on exactly. Where placement fails, SGLang
allocates as it always did and the sidecar is told nothing: sessions then have no KV to come back to.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

from ...session.errors import ArenaError, PoolError
from ...session.held import HolderClient
from ...session.layout import PoolMeta
from ..guard import log, patch, report
from ..held_pool import Memory, aligned, offered
from ..plugin_settings import PluginSettings, plugin_settings
from ..pool_layout import layout_of, meaning_of

RANK = 0
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Placed:
    """This process's pool; `adopted` is the name that it had in the epoch before, `meaning` how its bytes read."""

    name: str
    memory: Memory
    adopted: str | None
    fingerprint: str
    meaning: str


_placed: Placed | None = None


def placed() -> Placed | None:
    """The pool that was placed in this process and announced, if any."""
    return _placed


def install() -> None:
    """Hook the allocation of a plain pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    patch(MHATokenToKVPool, "_create_buffers", ("self",), _placing)


def _placing(original: Any) -> Any:
    def _create_buffers(self: Any) -> None:
        memory = adopted = None
        settings = plugin_settings()
        try:
            if settings is not None and _placed is None and _is_plain(self):
                memory, adopted = _memory_for(settings, self)
        except Exception:
            report("placement of the KV pool")
        if settings is None or memory is None:
            original(self)
            return
        _laid_into(memory, original, self)
        try:
            _announce(settings, memory, adopted, self)
        except Exception:
            report("announcement of the KV pool")

    return _create_buffers


def _is_plain(pool: Any) -> bool:
    """Whether its tensors are `[slots, heads, size]`, where a pool can be made, and not of a rank among several."""
    from sglang.srt.distributed import get_tensor_model_parallel_world_size
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and _device_of(pool).type in DEVICES
    return plain and not pool.enable_custom_mem_pool and int(get_tensor_model_parallel_world_size()) == 1


def _device_of(pool: Any) -> Any:
    """Where SGLang has its tensors: on a GPU that it names by nothing but its kind it is the current one."""
    import torch

    return torch.device(pool.device)


def _kind(device: Any) -> Any:
    if device.type == "cuda":
        from ..pool_cuda import CudaMemory

        return CudaMemory
    from ..pool_host import HostMemory

    return HostMemory


def _shapes(pool: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors, in the order in which SGLang asks for them: keys of all layers, then values."""
    slots = pool.size + pool.page_size
    keys = [(slots, pool.head_num, pool.head_dim)] * pool.layer_num
    return keys + [(slots, pool.head_num, pool.v_head_dim)] * pool.layer_num


def _form_of(pool: Any) -> str:
    text = repr((_shapes(pool), str(pool.store_dtype), pool.page_size))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _memory_for(settings: PluginSettings, pool: Any) -> tuple[Memory, str | None]:
    size_bytes = sum(aligned(math.prod(shape) * pool.store_dtype.itemsize) for shape in _shapes(pool))
    if settings.adopt is not None:
        try:
            return _adopt(settings, pool, size_bytes)
        except (PoolError, ArenaError) as error:
            log.warning("midstream: the old pool cannot be adopted (%s); a new one is made", error)
    device = _device_of(pool)
    return _kind(device).create(size_bytes, device), None


def _adopt(settings: PluginSettings, pool: Any, size_bytes: int) -> tuple[Memory, str]:
    from .identity import may_adopt

    if not may_adopt():
        raise PoolError("this engine could not be seen to keep off the old sessions' pages")
    fd, old = offered(settings, RANK)
    try:
        if old.meta.size_bytes < size_bytes or old.meta.owner.get("shape") != _form_of(pool):
            raise PoolError(f"pool {old.name} has another size or shape; start the engine with the same options")
        device = _device_of(pool)
        return _kind(device).adopt(fd, old.meta, device), old.name
    except Exception:
        os.close(fd)
        raise


def _laid_into(memory: Memory, original: Any, pool: Any) -> None:
    """Have SGLang's function make its tensors, with their memory taken from `memory`, one after the other."""
    from sglang.srt.mem_cache import memory_pool as module

    torch = module.torch
    end = 0

    class Placing:
        """`torch` as the allocating module sees it: only tensors of zeros come from elsewhere."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, shape: Any, **options: Any) -> Any:
            nonlocal end
            dtype = options["dtype"]
            size_bytes = math.prod(shape) * dtype.itemsize
            # More than was counted lies outside: such a pool is not announced.
            if end + size_bytes > memory.size_bytes:
                return torch.zeros(shape, **options)
            laid = memory.tensor(end, size_bytes).view(dtype).view(*shape)
            end = aligned(end + size_bytes)
            return laid

    module.torch = Placing()
    try:
        original(pool)
    finally:
        module.torch = torch


def _announce(settings: PluginSettings, memory: Memory, adopted: str | None, pool: Any) -> None:
    """Register the pool with the holder. Raises PoolError."""
    global _placed
    # What was adopted is written to from now on, whether or not anybody is told.
    _placed = Placed("", memory, adopted, "", "")
    views = {f"k{i}": tensor for i, tensor in enumerate(pool.k_buffer)}
    views |= {f"v{i}": tensor for i, tensor in enumerate(pool.v_buffer)}
    block_count = (pool.size + pool.page_size) // pool.page_size
    layout = layout_of(views, memory.address, block_count, pool.page_size)
    layout.check_fits(memory.size_bytes)
    meaning = meaning_of(views, block_count)
    name = settings.pool_name(RANK)
    owner = {
        "pid": os.getpid(),
        "fd": memory.fd,
        "shape": _form_of(pool),
        "meaning": meaning,
        "adopted_from": adopted,
    }
    meta = PoolMeta(memory.size_bytes, layout, layout.fingerprint(), owner, memory.memory, memory.identity)
    HolderClient(settings.holder).put(name, memory.fd, meta.to_json())
    _placed = Placed(name, memory, adopted, layout.fingerprint(), meaning)
    log.info("midstream: KV pool %s, %d bytes in %s, %s", name, memory.size_bytes, memory.memory, adopted or "new")
