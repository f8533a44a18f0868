"""The models that are measured, and how an engine of each is started. Pure but for writing a model's folder.

Owns their shapes and options. The large one has the shape of an 8B Llama and random weights: its speed is that of a
real one, its answers mean nothing. The small one is real, and is what exactness is judged on.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...session.errors import ConfigError

SERVED_AS = "m"
# Ids that are no special tokens of the small model's tokenizer, which both models use.
ID_MIN, ID_MAX = 100, 49_000
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how much KV a token has."""

    layers: int
    kv_heads: int
    head_size: int
    item_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one position."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.item_bytes


LARGE = Shape(layers=32, kv_heads=8, head_size=128)

LARGE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": LARGE.layers,
    "num_attention_heads": 32,
    "num_key_value_heads": LARGE.kv_heads,
    "head_dim": LARGE.head_size,
    "vocab_size": 49_152,
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_large(tokenizer_from: Path, folder: Path) -> Path:
    """The large model's folder: its configuration, and the tokenizer of a model folder. ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(tokenizer_from.iterdir()):
            if path.is_file() and path.suffix not in _WEIGHTS and path.name != "config.json":
                shutil.copy(path, folder / path.name)
        (folder / "config.json").write_text(json.dumps(LARGE_CONFIG, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{tokenizer_from}: no model folder to take the tokenizer from ({error})") from error
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"{tokenizer_from} has no tokenizer.json; unpack the small model there first")
    return folder


def large_options(kv_bytes: int, *, len_max: int = 36_864, seqs_max: int = 128) -> tuple[str, ...]:
    """The options of one of two engines that share a card: each says how much KV it takes, for each would else profile
    the memory that the other is just taking; the share of the card is then only what must be free at the start."""
    return (
        "--load-format", "dummy", "--max-model-len", str(len_max), "--max-num-seqs", str(seqs_max),
        "--kv-cache-memory-bytes", str(kv_bytes), "--gpu-memory-utilization", "0.3",
        "--cudagraph-capture-sizes", *(str(2**n) for n in range(7)),
    )  # fmt: skip


def small_options(kv_bytes: int = 4 << 30) -> tuple[str, ...]:
    """The options of a small engine for exactness."""
    return (
        "--max-model-len", "4096", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(kv_bytes),
        "--gpu-memory-utilization", "0.2", "--structured-outputs-config.backend", "xgrammar",
        "--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64",
    )  # fmt: skip


def serve(model: Path, *options: str, served_as: str = SERVED_AS) -> list[str]:
    """An engine's command, without a port."""
    return ["vllm", "serve", str(model), "--served-model-name", served_as, *options]
