"""What this engine says of itself: its compatibility key and its pool."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ..alive import told_processes
from ..guard import guarded, log, missing
from ..weights import model_fingerprint, tokenizer_fingerprint
from . import penalties
from .obstacles import of_model, of_options
from .pool import placed
from .settings_of_engine import engine_version, server_options

# No KV depends on most of these, but how an answer goes on from it does.
_OPTIONS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "grammar_backend",
    "quantization",
    "enable_deterministic_inference",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "enable_torch_compile",
    "enable_mixed_chunk",
    "preferred_sampling_params",
    "reasoning_parser",
    "tool_call_parser",
    "enable_strict_thinking",
    "chat_template",
    "json_model_override_args",
    "enable_fp32_lm_head",
)
# Packages that SGLang's kernels for GPUs come from.
_KERNELS = ("sglang-kernel", "flashinfer-python", "triton")
_DRIVER = Path("/sys/module/nvidia/version")


def facts_of(scheduler: Any) -> tuple[dict[str, Any], bool]:
    """The facts for the arena, and whether this engine runs in the pool of the epoch before.

    What may be written to is told as it is, whether or not sessions of this engine have KV to come back to: somebody
    else's may lie there.
    """
    pool = placed()
    adopted = pool is not None and pool.adopted is not None
    announced = pool if pool is not None and pool.name else None
    words = inexact(scheduler)
    if words:
        log.warning("midstream: no KV of this engine is kept for its sessions, because of %s", ", ".join(words))
        # Nothing is carried to it or from it, so its key must not be that of an engine with a pool.
        announced = None
    layout = "unplaced" if announced is None else f"{announced.fingerprint}/{announced.meaning}"
    facts = {
        "v": 1,
        "engine": "sglang",
        "pid": os.getpid(),
        **told_processes(),
        "key": {**_key(scheduler), "kv_layout": layout},
        "pools": [] if announced is None else [announced.name],
        "adopted": adopted,
        "inexact": words,
        "inexact_sampled": inexact_sampled(),
        "block_tokens": scheduler.page_size,
        "max_sessions": scheduler.max_running_requests,
    }
    return facts, adopted


def may_adopt() -> bool:
    """Whether this engine may run in the pool of the epoch before; asked before its scheduler is complete.

    The model's own obstacles are not asked for: a pool of another shape is never adopted, and one of the same shape was
    not offered by an engine that had them.
    """
    return not (of_options(server_options(), engine_version()) or _of_hooks())


def inexact(scheduler: Any) -> list[str]:
    """Why sessions of this engine cannot go on exactly; [] when they can."""
    return of_options(server_options(), engine_version()) + of_model(scheduler) + _of_hooks()


def inexact_sampled() -> list[str]:
    """Why those that draw cannot; [] when they can, too."""
    options = server_options()
    known = options.enable_deterministic_inference and options.sampling_backend == "pytorch"
    return [] if known else ["random_state"]


def _of_hooks() -> list[str]:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    known = guarded(default=False)(penalties.all_known)(SamplingBatchInfo)
    return ["hooks"] if missing or not known else []


def _key(scheduler: Any) -> dict[str, str | int | None]:
    import torch

    options, model = server_options(), scheduler.model_config
    return {
        "engine": "sglang",
        "engine_version": engine_version(),
        "torch_version": str(torch.__version__),
        "device": _device(str(options.device)),
        "model": _fingerprint(options.model_path, model_fingerprint),
        "tokenizer": _fingerprint(options.tokenizer_path, tokenizer_fingerprint),
        "dtype": str(model.dtype),
        "kv_dtype": str(options.kv_cache_dtype),
        "block_tokens": scheduler.page_size,
        "parallel": f"tp{options.tp_size}-pp{options.pp_size}",
        "context": int(model.context_len),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        **_gpu(str(options.device)),
        **{name: _plain(getattr(options, name, None)) for name in _OPTIONS},
    }


def _device(kind: str) -> str:
    import torch

    if kind == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _gpu(kind: str) -> dict[str, str | int | None]:
    """What else decides which numbers a GPU computes: what lies below torch, and the kernels beside it."""
    if kind != "cuda":
        return {}
    import torch

    return {
        "driver": guarded(default="unknown")(_driver)(),
        "cuda_runtime": str(torch.version.cuda),
        **{name: _version(name) for name in _KERNELS},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    """The version of the kernel's driver, from whoever tells it here."""
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _plain(value: Any) -> str | int | None:
    """A setting as a key may hold it."""
    return value if value is None or isinstance(value, str | int) else repr(value)


def _fingerprint(name: str, of: Any) -> str:
    folder = Path(name)
    return str(of(folder)) if folder.is_dir() else name
