"""What this engine says of itself: its compatibility key and its pools."""

import os
import platform
from pathlib import Path
from typing import Any

from ...session.errors import PoolError
from ...session.held import HolderClient
from ..alive import told_processes
from ..guard import guarded, log, missing
from ..plugin_settings import PluginSettings
from ..weights import model_fingerprint, tokenizer_fingerprint
from .generators import draws_are_known
from .group import rank_count
from .obstacles import obstacles, of_options, plain_version

_MODEL_OPTIONS = ("max_model_len", "generation_config", "override_generation_config", "hf_overrides", "logprobs_mode")
_DRIVER = Path("/sys/module/nvidia/version")
_GRAMMAR_OPTIONS = ("backend", "reasoning_parser", "enable_in_reasoning", "disable_any_whitespace")


def facts_of(settings: PluginSettings, vllm_config: Any, kv_cache_config: Any) -> tuple[dict[str, Any], bool]:
    """The facts for the arena, and whether any rank runs, or may run, in the pool of the epoch before.

    What may be written to is told as it is, whether or not sessions of this engine have KV to come back to: somebody
    else's may lie there.
    """
    pools, adopted, fingerprint, owners = _pools(settings, rank_count(vllm_config))
    inexact = _inexact(vllm_config, kv_cache_config)
    if inexact:
        log.warning("midstream: no KV of this engine is kept for its sessions, because of %s", ", ".join(inexact))
        # Nothing is carried to it or from it, so its key must not be that of an engine with a pool.
        pools, fingerprint = [], ""
    facts = {
        "v": 1,
        "engine": "vllm",
        "pid": os.getpid(),
        **told_processes(owners),
        "key": {**_key(vllm_config), "kv_layout": fingerprint or "unplaced"},
        "pools": pools,
        "adopted": adopted,
        "inexact": inexact,
        "block_tokens": vllm_config.cache_config.block_size,
        "max_sessions": vllm_config.scheduler_config.max_num_seqs,
        # vLLM's `--api-server-count`.
        "front_ends": getattr(vllm_config.parallel_config, "_api_process_count", 1),
    }
    return facts, adopted


def may_adopt(vllm_config: Any) -> bool:
    """Whether a worker of this engine may run in the pool of the epoch before.

    The cache's own obstacles are not asked for: a pool of another shape is never adopted, and one of the same shape
    was not offered by an engine that had them.
    """
    import vllm

    return not (of_options(vllm_config, plain_version(vllm)) or _of_hooks(vllm_config))


def _inexact(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Why sessions of this engine cannot go on exactly; [] when they can."""
    import vllm

    return obstacles(vllm_config, kv_cache_config, plain_version(vllm)) + _of_hooks(vllm_config)


def _of_hooks(vllm_config: Any) -> list[str]:
    """What the hooks cannot do in this process."""
    found = []
    if missing:
        found.append("hooks")
    if not guarded(default=False)(draws_are_known)(vllm_config):
        found.append("random_state")
    return found


def _pools(settings: PluginSettings, ranks: int) -> tuple[list[str], bool, str, list[int]]:
    """Names, whether any was adopted, how their blocks are made up, and the pids of the workers that have them.

    Where that is not known for a rank there is no pool to come back to, and an old one that was offered counts as
    adopted.
    """
    names: list[str] = []
    silent: list[int] = []
    fingerprints: list[str] = []
    owners: list[int] = []
    adopted: list[bool] = []
    for rank in range(ranks):
        name = settings.pool_name(rank)
        try:
            fd, meta = HolderClient(settings.holder).get(name)
        except PoolError as error:
            log.warning("midstream: no held pool for rank %d (%s); sessions will be recomputed", rank, error)
            return [], settings.adopt is not None, "", owners
        os.close(fd)
        names.append(name)
        owners.append(int(meta["owner"]["pid"]))
        adopted.append(bool(meta["owner"].get("adopted_from")))
        if ranks > 1 and not meta["owner"].get("commits"):
            silent.append(rank)
        # How a block is made up, and what its bytes mean.
        meaning = meta["owner"].get("meaning")
        fingerprints.append(str(meta["fingerprint"]) + (f"/{meaning}" if meaning else ""))
    if any(adopted) and not all(adopted):
        log.warning("midstream: only some ranks run in the old pools; sessions will be recomputed")
        return [], True, "", owners
    if silent:
        log.warning("midstream: ranks %s cannot say what they have done; sessions will be recomputed", silent)
        return [], any(adopted), "", owners
    return names, any(adopted), "+".join(dict.fromkeys(fingerprints)), owners


def _key(vllm_config: Any) -> dict[str, str | int | None]:
    import torch
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    lora, grammars = vllm_config.lora_config, getattr(vllm_config, "structured_outputs_config", None)
    return {
        "engine": "vllm",
        "engine_version": str(vllm.__version__),
        "torch_version": str(torch.__version__),
        "device": _device(vllm_config.device_config.device_type),
        "model": _fingerprint(model.model, model_fingerprint),
        "tokenizer": _fingerprint(model.tokenizer, tokenizer_fingerprint),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "block_tokens": cache.block_size,
        "parallel": f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}",
        "quantization": str(model.quantization),
        "enforce_eager": int(model.enforce_eager),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        **_gpu(vllm_config),
        "threads": os.environ.get("OMP_NUM_THREADS") or os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
        "lora": None if lora is None else f"rank{lora.max_lora_rank}",
        # No KV depends on these, but how an answer goes on from it does.
        **{name: _plain(getattr(model, name, None)) for name in _MODEL_OPTIONS},
        **{f"grammar_{name}": _plain(getattr(grammars, name, None)) for name in _GRAMMAR_OPTIONS},
    }


def _plain(value: Any) -> str | int | None:
    """A setting as a key may hold it."""
    if value is None or isinstance(value, str | int):
        return value
    # A function is called the same in each process, but lies elsewhere.
    return str(getattr(value, "__qualname__", None) or repr(value))


def _device(kind: str) -> str:
    if kind == "cuda":
        from vllm.platforms import current_platform

        # Asked of NVML: the core has no CUDA context, and must not get one, where workers are processes of their own.
        return str(current_platform.get_device_name())
    import torch

    return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _gpu(vllm_config: Any) -> dict[str, str | int | None]:
    """What else decides which numbers a GPU computes: what lies below torch, and which kernels options choose."""
    if vllm_config.device_config.device_type != "cuda":
        return {}
    import torch

    compilation = vllm_config.compilation_config
    return {
        "driver": guarded(default="unknown")(_driver)(),
        "cuda_runtime": str(torch.version.cuda),
        "model_runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT"),
        "compilation": str(getattr(compilation, "mode", None)),
        "cuda_graphs": str(getattr(compilation, "cudagraph_mode", None)),
    }


def _driver() -> str:
    """The version of the kernel's driver, from whoever tells it here."""
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _fingerprint(name: str, of: Any) -> str:
    folder = Path(name)
    return str(of(folder)) if folder.is_dir() else name
