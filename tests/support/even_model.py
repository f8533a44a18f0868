"""A small model that two ranks can share: an even number of heads, random weights, the tokenizer of another.

Owns the folder that it writes. What the model says is noise, but noise that hangs on every token before it: embeddings
are small beside what attention adds to them, and attention is sharp enough to tell positions apart. It says no halves
of characters that nobody asks for.
"""

import json
import random
from pathlib import Path
from typing import Any

from support.vllm_models import broken_tokens

LAYERS = 3
HIDDEN = 256
INTERMEDIATE = 512
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_HEAD = "lm_head.weight"
_ONE = b"\x80\x3f"
# The upper byte of a bfloat16 between 2^-7 and 2^-5, or 2^-5 and 2^-3, of either sign.
SMALL, LARGE = 0x3C, 0x3D


def even(model: Path, folder: Path, seed: int = 0) -> Path:
    """A model with the tokenizer and the vocabulary of `model`."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name not in (_WEIGHTS, _CONFIG):
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / _CONFIG).read_text())
    shape = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "num_hidden_layers": LAYERS,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / _CONFIG).write_text(json.dumps({**config, **shape}))
    source = random.Random(seed)
    tensors: list[tuple[str, list[int], bytearray]] = []
    for name, dimensions, upper in _matrices(int(config["vocab_size"])):
        values = _noise(source, dimensions[0] * dimensions[1], upper)
        if name == _HEAD:
            for token in broken_tokens(model):
                # As likely as the mean of all words: others are likelier by far.
                values[2 * HIDDEN * token : 2 * HIDDEN * (token + 1)] = bytes(2 * HIDDEN)
        tensors.append((name, dimensions, values))
    tensors += [(name, [HIDDEN], bytearray(_ONE * HIDDEN)) for name in _norms()]
    header: dict[str, Any] = {}
    at = 0
    for name, dimensions, raw in tensors:
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / _WEIGHTS).open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        for _, _, raw in tensors:
            sink.write(raw)
    return folder


def _matrices(words: int) -> list[tuple[str, list[int], int]]:
    """Name, shape, and how large the values are."""
    found = [("model.embed_tokens.weight", [words, HIDDEN], SMALL), (_HEAD, [words, HIDDEN], LARGE)]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found += [
            (f"{prefix}.self_attn.q_proj.weight", [HEADS * HEAD_SIZE, HIDDEN], LARGE),
            (f"{prefix}.self_attn.k_proj.weight", [KV_HEADS * HEAD_SIZE, HIDDEN], LARGE),
            (f"{prefix}.self_attn.v_proj.weight", [KV_HEADS * HEAD_SIZE, HIDDEN], LARGE),
            (f"{prefix}.self_attn.o_proj.weight", [HIDDEN, HEADS * HEAD_SIZE], LARGE),
            (f"{prefix}.mlp.gate_proj.weight", [INTERMEDIATE, HIDDEN], LARGE),
            (f"{prefix}.mlp.up_proj.weight", [INTERMEDIATE, HIDDEN], LARGE),
            (f"{prefix}.mlp.down_proj.weight", [HIDDEN, INTERMEDIATE], SMALL),
        ]
    return found


def _norms() -> list[str]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [*(f"model.layers.{n}.{name}.weight" for n in range(LAYERS) for name in names), "model.norm.weight"]


def _noise(source: random.Random, count: int, upper: int) -> bytearray:
    """Values of random sign and size within four times the least."""
    signs = bytes(upper | (byte & 1) << 7 for byte in range(256))
    raw = bytearray(2 * count)
    raw[0::2] = source.randbytes(count)
    raw[1::2] = source.randbytes(count).translate(signs)
    return raw
