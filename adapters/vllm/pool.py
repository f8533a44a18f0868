"""Placement of the KV pool: in memory that the holder keeps, or the pool of the epoch before.

Owns the one buffer of this process. Nothing here ever zeroes a pool that was adopted, and none is adopted while a
process of the engine that had it is left, nor by an engine whose own sessions cannot go on exactly. Where placement
fails, vLLM allocates as it always did and the sidecar is told nothing: sessions then have no KV to come back to.
"""

import hashlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...session.errors import ArenaError, PoolError
from ...session.held import HolderClient, create_host_pool, map_pool
from ...session.layout import Plane, PoolLayout, PoolMeta
from ..alive import require_gone
from .guard import log, patch, report
from .settings import plugin_settings


@dataclass(slots=True)
class PlacedPool:
    """This process's pool: descriptor and mapping stay open as long as the engine lives."""

    fd: int
    size_bytes: int
    shape: str
    memory: mmap.mmap
    tensor: Any
    adopted_from: str | None
    name: str


_placed: PlacedPool | None = None
_installed = False


def placed() -> PlacedPool | None:
    """The pool that was placed in this process, if any."""
    return _placed


def install(*, adopting: bool) -> None:
    """Hook the allocation of the CPU backend (0.32: one int8 buffer for all layers), in a worker and once.

    Without `adopting` the pool is one of its own, whatever was offered: an engine that may not be seen to keep off the
    blocks of the old sessions must not run in their memory.
    """
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.v1.worker import gpu_model_runner, utils

    def make(original: Any) -> Any:
        def allocate_kv_cache(kv_cache_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            if device.type != "cpu":
                return original(kv_cache_config, device, *args, **kwargs)
            return _allocate(utils, original, adopting, kv_cache_config, device, *args, **kwargs)

        return allocate_kv_cache

    # The runner imported the function by name, so that is the name to replace.
    patch(gpu_model_runner, "allocate_kv_cache", ("kv_cache_config", "device", "layout"), make)


def _allocate(module: Any, original: Any, adopting: bool, config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's own allocation, with its one large buffer laid into a held pool."""
    global _placed
    torch = module.torch
    shape = _shape(config, args)

    class Placing:
        """`torch` as the allocating module sees it: only its large int8 buffer comes from elsewhere."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *size: Any, **options: Any) -> Any:
            global _placed
            large = len(size) == 1 and isinstance(size[0], int) and options.get("dtype") is torch.int8
            if large and _placed is None:
                try:
                    _placed = _place(size[0], shape, adopting=adopting)
                    return _placed.tensor
                except Exception:
                    report("placement of the KV pool")
            return torch.zeros(*size, **options)

    module.torch = Placing()
    try:
        return original(config, device, *args, **kwargs)
    finally:
        module.torch = torch


def _shape(config: Any, args: tuple[Any, ...]) -> str:
    """What must be equal for a new engine to find its KV where an old one left it."""
    text = repr((config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups, args))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _place(size_bytes: int, shape: str, *, adopting: bool) -> PlacedPool:
    import torch

    settings = plugin_settings()
    if settings is None:
        raise PoolError("no holder is named in the environment")
    rank = _rank()
    name = settings.pool_name(rank)
    fd, adopted_from = None, None
    if adopting and settings.adopt is not None:
        try:
            fd, adopted_from = _old_pool(size_bytes, shape, rank)
        except (PoolError, ArenaError) as error:
            log.warning("midstream: the old pool cannot be adopted (%s); a new one is made", error)
    if fd is None:
        fd = create_host_pool(size_bytes)
    memory = map_pool(fd, size_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.int8)
    log.info("midstream: KV pool %s, %d bytes, %s", name, size_bytes, adopted_from or "new")
    return PlacedPool(fd, size_bytes, shape, memory, tensor, adopted_from, name)


def _old_pool(size_bytes: int, shape: str, rank: int) -> tuple[int, str]:
    from ...session.arena import ArenaReader

    settings = plugin_settings()
    if settings is None or settings.adopt is None:
        raise PoolError("no arena to adopt from is named")
    if settings.arena is None:
        raise PoolError("without an arena of its own this engine could not keep off the old sessions' blocks")
    ArenaReader(settings.arena).close()
    reader = ArenaReader(settings.adopt)
    try:
        facts = reader.facts() or {}
    finally:
        reader.close()
    pools = facts.get("pools") or []
    if rank >= len(pools):
        raise PoolError(f"the old engine had no pool for rank {rank}")
    require_gone(facts)
    fd, meta = HolderClient(settings.holder).get(pools[rank])
    owner = PoolMeta.from_json(meta).owner
    if meta["size_bytes"] != size_bytes or owner.get("shape") != shape:
        os.close(fd)
        raise PoolError(f"pool {pools[rank]} has another size or shape; start the engine with the same options")
    return fd, str(pools[rank])


def announce(kv_caches: Mapping[str, Any], block_count: int, block_tokens: int) -> None:
    """Register the pool with the holder, once its layers are known. Raises PoolError."""
    pool, settings = _placed, plugin_settings()
    if pool is None or settings is None:
        return
    layout = layout_of(kv_caches, pool.tensor.data_ptr(), block_count, block_tokens)
    owner = {"pid": os.getpid(), "fd": pool.fd, "shape": pool.shape, "adopted_from": pool.adopted_from}
    meta = PoolMeta(pool.size_bytes, layout, layout.fingerprint(), owner)
    HolderClient(settings.holder).put(pool.name, pool.fd, meta.to_json())


def layout_of(kv_caches: Mapping[str, Any], base: int, block_count: int, block_tokens: int) -> PoolLayout:
    """Where the blocks lie, from the layers' views `[blocks, ...]` over the buffer at address `base`."""
    planes = {_plane(name, view, base, block_count) for name, view in kv_caches.items()}
    return PoolLayout(block_count, block_tokens, tuple(_merged(sorted(planes, key=lambda p: p.offset))))


def _plane(name: str, view: Any, base: int, block_count: int) -> Plane:
    if view.shape[0] % block_count:
        raise PoolError(f"layer {name}: shape {tuple(view.shape)} is not one of {block_count} blocks")
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
