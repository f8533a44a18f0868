"""Placement of the KV pool: in memory that the holder keeps, or the pool of the epoch before.

Owns the one pool of this process. All that vLLM allocates for KV lies in it, one tensor after the other, on the
engine's device (pool_host.py, pool_cuda.py). Nothing here ever zeroes a pool that was adopted, and none is adopted
while a process of the engine that had it is left, nor by an engine whose own sessions cannot go on exactly, nor by a
worker that cannot be kept from writing to it while it warms up. Where placement fails, vLLM allocates as it always did
and the sidecar is told nothing: sessions then have no KV to come back to.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...session.errors import ArenaError, PoolError
from ...session.held import HolderClient
from ...session.layout import PoolMeta
from ..guard import guarded, log, patch, report
from ..held_pool import Adopted, Memory, aligned, offered
from ..plugin_settings import PluginSettings, plugin_settings
from ..pool_layout import layout_of, meaning_of
from .group import rank_of_worker

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """This process's pool."""

    name: str
    memory: Memory
    wanted: "Wanted"
    adopted: Adopted | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What vLLM needs for its cache: so many bytes of KV, in a pool of so many, laid out in this way."""

    kv_bytes: int
    size_bytes: int
    shape: str

    @classmethod
    def by(cls, config: Any, words: tuple[Any, ...]) -> "Wanted":
        """What this configuration of a cache asks for; `words` are what else decides how KV lies in it.

        One buffer is made for all tensors with a stride of their own, one for each other.
        """
        shared = max((t.size for t in config.kv_cache_tensors if t.block_stride > 0), default=0)
        sizes = [shared, *(t.size for t in config.kv_cache_tensors if not t.block_stride > 0)]
        text = repr((config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups, words))
        shape = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return cls(sum(sizes), sum(map(aligned, sizes)), shape)


_placed: PlacedPool | None = None
_installed = False


def placed() -> PlacedPool | None:
    """The pool that was placed in this process, if any."""
    return _placed


def install(*, adopting: bool, v2: bool) -> None:
    """Hook the allocation of the model runner in use (`v2` or the first one), in a worker and once.

    Without `adopting` the pool is one of its own, whatever was offered: an engine that may not be seen to keep off the
    blocks of the old sessions must not run in their memory.
    """
    global _installed
    if _installed:
        return
    _installed = True
    placing = _Placing(adopting, v2)
    if v2:
        from vllm.v1.worker.gpu import attn_utils

        if hasattr(attn_utils, "allocate_kv_cache"):
            patch(attn_utils, "allocate_kv_cache", ("kv_cache_config", "device", "layout"), placing.by_device)
        else:
            patch(attn_utils, "_allocate_kv_cache", ("kv_cache_config", "shared_layers", "device"), placing.by_layers)
        return
    from vllm.v1.worker import gpu_model_runner

    # Where the runner imported a function by name, that is the name to replace.
    if hasattr(gpu_model_runner, "allocate_kv_cache"):
        patch(gpu_model_runner, "allocate_kv_cache", ("kv_cache_config", "device", "layout"), placing.by_device)
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch(GPUModelRunner, "_allocate_kv_cache_tensors", ("self", "kv_cache_config"), placing.by_runner)


@dataclass(frozen=True, slots=True)
class _Placing:
    """vLLM's allocating functions, of each version and runner, with their memory taken from a held pool."""

    adopting: bool
    v2: bool

    def by_device(self, original: Any) -> Any:
        """0.32, both runners."""

        def allocate_kv_cache(kv_cache_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            def allocate() -> Any:
                return original(kv_cache_config, device, *args, **kwargs)

            return self._within(original, allocate, kv_cache_config, device, args)

        return allocate_kv_cache

    def by_layers(self, original: Any) -> Any:
        """0.25, V2 runner."""

        def _allocate_kv_cache(kv_cache_config: Any, shared_layers: Any, device: Any) -> Any:
            def allocate() -> Any:
                return original(kv_cache_config, shared_layers, device)

            words = (shared_layers, _order_of_dimensions())
            return self._within(original, allocate, kv_cache_config, device, words)

        return _allocate_kv_cache

    def by_runner(self, original: Any) -> Any:
        """0.25, V1 runner."""

        def _allocate_kv_cache_tensors(runner: Any, kv_cache_config: Any) -> Any:
            def allocate() -> Any:
                return original(runner, kv_cache_config)

            device = getattr(runner, "device", None)
            return self._within(original, allocate, kv_cache_config, device, (_order_of_dimensions(),))

        return _allocate_kv_cache_tensors

    def _within(
        self, original: Any, allocate: Callable[[], Any], config: Any, device: Any, words: tuple[Any, ...]
    ) -> Any:
        global _placed
        pool = module = None
        try:
            if config.kv_cache_tensors and _placed is None and device.type in DEVICES:
                module = sys.modules[original.__module__]
                if not hasattr(module, "torch"):
                    raise PoolError(f"{module.__name__} does not allocate by its own name `torch`")
                pool = _place(Wanted.by(config, words), device, adopting=self.adopting, v2=self.v2)
        except Exception:
            report("placement of the KV pool")
        if pool is None:
            return allocate()
        result = _laid_into(pool.memory, module, allocate)
        _placed = pool
        return result


def _laid_into(memory: Memory, module: Any, allocate: Callable[[], Any]) -> Any:
    """What `allocate` returns, a function of `module`, with its large int8 buffers lying in `memory`."""
    torch = module.torch
    end = 0

    class Placing:
        """`torch` as the allocating module sees it: only its int8 buffers come from elsewhere."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *size: Any, **options: Any) -> Any:
            nonlocal end
            large = len(size) == 1 and isinstance(size[0], int) and options.get("dtype") is torch.int8
            # More than the configuration says, or what cannot be had there, lies outside: such a pool is not announced.
            if large and end + size[0] <= memory.size_bytes:
                try:
                    laid = memory.tensor(end, size[0])
                except Exception:
                    report("a tensor in the KV pool")
                else:
                    end = aligned(end + size[0])
                    return laid
            return torch.zeros(*size, **options)

    module.torch = Placing()
    try:
        return allocate()
    finally:
        module.torch = torch


@guarded(default="unknown")
def _order_of_dimensions() -> str:
    """0.25: whether heads or tokens come first in a block, which the cache's configuration does not say."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return str(get_kv_cache_layout())


def _kind(device: Any) -> Any:
    if device.type == "cuda":
        from ..pool_cuda import CudaMemory

        return CudaMemory
    from ..pool_host import HostMemory

    return HostMemory


def _place(wanted: Wanted, device: Any, *, adopting: bool, v2: bool) -> PlacedPool:
    settings = plugin_settings()
    if settings is None:
        raise PoolError("no holder is named in the environment")
    rank = rank_of_worker()
    name = settings.pool_name(rank)
    memory, adopted = None, None
    if adopting and settings.adopt is not None:
        try:
            memory, adopted = _adopt(settings, wanted, device, rank, v2=v2)
        except (PoolError, ArenaError) as error:
            log.warning("midstream: the old pool cannot be adopted (%s); a new one is made", error)
    if memory is None:
        memory = _kind(device).create(wanted.size_bytes, device)
    log.info(
        "midstream: KV pool %s, %d bytes in %s, %s",
        name,
        memory.size_bytes,
        memory.memory,
        "new" if adopted is None else adopted.name,
    )
    return PlacedPool(name, memory, wanted, adopted)


def _adopt(settings: PluginSettings, wanted: Wanted, device: Any, rank: int, *, v2: bool) -> tuple[Memory, Adopted]:
    fd, old = offered(settings, rank)
    try:
        if old.meta.size_bytes < wanted.size_bytes or old.meta.owner.get("shape") != wanted.shape:
            raise PoolError(f"pool {old.name} has another size or shape; start the engine with the same options")
        if v2 and not _kept_off():
            raise PoolError("this vLLM cannot be kept from writing to its blocks while it warms up")
        return _kind(device).adopt(fd, old.meta, device), old
    except Exception:
        os.close(fd)
        raise


def _kept_off() -> bool:
    from . import warm_up

    return guarded(default=False)(warm_up.keep_off)()


def announce(kv_caches: Mapping[str, Any], block_count: int, block_tokens: int, *, commits: bool = False) -> None:
    """Register the pool with the holder, once its layers are known. Raises PoolError.

    `commits`: this worker is one of several ranks, and says of each step when it has done it.
    """
    pool, settings = _placed, plugin_settings()
    if pool is None or settings is None:
        return
    memory = pool.memory
    layout = layout_of(kv_caches, memory.address, block_count, block_tokens)
    meaning = meaning_of(kv_caches, block_count)
    old = pool.adopted
    if old is not None and (old.meta.layout, old.meta.owner.get("meaning")) != (layout, meaning):
        raise PoolError(f"pool {old.name} was adopted, but its blocks lie or read otherwise; sessions are recomputed")
    owner = {
        "pid": os.getpid(),
        "fd": memory.fd,
        "shape": pool.wanted.shape,
        "kv_bytes": pool.wanted.kv_bytes,
        "meaning": meaning,
        "adopted_from": None if old is None else old.name,
        "commits": commits,
    }
    layout.check_fits(memory.size_bytes)
    meta = PoolMeta(memory.size_bytes, layout, layout.fingerprint(), owner, memory.memory, memory.identity)
    HolderClient(settings.holder).put(pool.name, memory.fd, meta.to_json())
