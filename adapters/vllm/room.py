"""Room on a GPU for the pool that is about to be adopted: it is there already, and vLLM would look for it once more.

vLLM refuses to start where less memory is free than its share of the card, and makes its KV cache as large as what is
left of that share after profiling. A held pool is memory in use for both. Invariant: an engine that may adopt a pool of
this GPU counts it as free, and asks for a KV cache of exactly its size, because it can adopt no other; one that may not
adopt is left alone. Nothing is allocated here.
"""

import contextlib
import multiprocessing
import os
from typing import Any

from ...session.errors import ArenaError, PoolError
from ...session.layout import cuda_memory
from ...session.vram import device_uuid
from ..guard import guarded, log, patch
from ..held_pool import gone, offered
from ..plugin_settings import plugin_settings
from .group import rank_of_worker
from .identity import may_adopt

_worker: Any = None
_kv_bytes: int | None = None


def install() -> None:
    """Hook the sizing of memory where a pool is offered, in a process of the engine that may have a worker in it."""
    settings = plugin_settings()
    if settings is None or settings.adopt is None or multiprocessing.parent_process() is None:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu_worker import Worker

    # Without any of them the engine sizes its memory as ever: sessions are exact all the same.
    patch(Worker, "init_device", ("self",), _with_worker, needed=False)
    patch(gpu_worker, "request_memory", ("init_snapshot", "cache_config"), _counting_as_free, needed=False)
    patch(Worker, "determine_available_memory", ("self",), _of_the_same_size, needed=False)


def _with_worker(original: Any) -> Any:
    def init_device(self: Any) -> Any:
        global _worker
        # The function that asks for memory is not told by whom it is called.
        _worker = self
        # The memory of the old engine's weights is free when its last process has ended, and is looked at soon.
        guarded(default=None)(_wait_for_the_old)()
        try:
            return original(self)
        finally:
            _worker = None

    return init_device


def _counting_as_free(original: Any) -> Any:
    def request_memory(init_snapshot: Any, cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        init_snapshot.free_memory += guarded(default=0)(_offered_bytes)()
        return original(init_snapshot, cache_config, *args, **kwargs)

    return request_memory


def _of_the_same_size(original: Any) -> Any:
    def determine_available_memory(self: Any) -> Any:
        found = original(self)
        if _kv_bytes is None:
            return found
        log.info(
            "midstream: %d bytes of KV, as in the old pool (this start alone would have taken %s)", _kv_bytes, found
        )
        return _kv_bytes

    return determine_available_memory


def _wait_for_the_old() -> None:
    settings = plugin_settings()
    if settings is not None and may_adopt(_worker.vllm_config):
        # Whoever cannot be waited for is told of where the pool is asked for.
        with contextlib.suppress(PoolError, ArenaError):
            gone(settings)


def _offered_bytes() -> int:
    """What the pool takes of this GPU that this worker is going to adopt; 0 where it will not."""
    global _kv_bytes
    import torch

    settings = plugin_settings()
    if settings is None or _worker is None or not may_adopt(_worker.vllm_config):
        return 0
    try:
        fd, old = offered(settings, rank_of_worker())
    except (PoolError, ArenaError) as error:
        log.warning("midstream: no old pool to make room for (%s)", error)
        return 0
    os.close(fd)
    kv_bytes = old.meta.owner.get("kv_bytes")
    is_here = old.meta.memory == cuda_memory(device_uuid(torch.cuda.current_device()))
    if not is_here or not isinstance(kv_bytes, int) or not 0 < kv_bytes <= old.meta.size_bytes:
        return 0
    _kv_bytes = kv_bytes
    return old.meta.size_bytes
