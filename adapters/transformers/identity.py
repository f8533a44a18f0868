"""The engine's compatibility key: what must be equal for its KV, and its next token, to be another's.

Owns which facts go into the key. On a CPU the instruction set, the processor and the number of threads are among them:
they change the order of additions, and so the last bits.
"""

import platform
from pathlib import Path
from typing import Any

from ..weights import model_fingerprint, tokenizer_fingerprint


def device_name(device: Any) -> str:
    """The device as the key names it."""
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, driver {_driver_version()}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}, {_processor()}"


def compatibility_key(
    *, folder: Path, model: Any, layout_fingerprint: str, block_tokens: int, threads: int, dtype: str
) -> dict[str, str | int | None]:
    """The key of this process (docs/transformers.md says why each field is in it)."""
    import torch
    import transformers

    return {
        "engine": "transformers",
        "engine_version": transformers.__version__,
        "torch_version": torch.__version__,
        "device": device_name(model.device),
        "model": model_fingerprint(folder),
        "tokenizer": tokenizer_fingerprint(folder),
        "dtype": dtype,
        "kv_dtype": str(model.kv_shape.dtype).removeprefix("torch."),
        "kv_layout": layout_fingerprint,
        "block_tokens": block_tokens,
        "parallel": "tp1",
        "attention": model.attention,
        "threads": threads,
        "lora": None,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), "unknown")
