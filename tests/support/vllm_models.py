"""What the demo's model lacks for tests: speed, tokens to think and call tools with, and adapters of its own.

Owns the folders that it writes. What is not changed is linked; adapters are random and follow from their seed.
"""

import json
import random
import struct
from array import array
from pathlib import Path
from typing import Any

# Tokens that the model has no use for, and what they are called instead.
RENAMED = {
    "<jupyter_start>": "<think>",
    "<jupyter_text>": "</think>",
    "<jupyter_code>": "<tool_call>",
    "<jupyter_output>": "</tool_call>",
}
THINK_END_ID = 12
RANK = 8
# So many of the first and of the last layers are left of a shallow model.
EITHER_END = 4
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def shallow(model: Path, folder: Path) -> Path:
    """A model without its middle layers: three times as fast, and what it says makes no sense.

    It hangs on every token before it all the more: two prompts that differ in a word have nothing in common soon. It
    says no halves of characters that nobody asks for.
    """
    folder.mkdir()
    for path in model.iterdir():
        if path.name not in (_WEIGHTS, _CONFIG):
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / _CONFIG).read_text())
    kept = [*range(EITHER_END), *range(config["num_hidden_layers"] - EITHER_END, config["num_hidden_layers"])]
    changed = {"num_hidden_layers": len(kept), "tie_word_embeddings": False}
    (folder / _CONFIG).write_text(json.dumps({**config, **changed}))
    with (model / _WEIGHTS).open("rb") as source, (folder / _WEIGHTS).open("wb") as sink:
        size = int.from_bytes(source.read(8), "little")
        told: dict[str, Any] = json.loads(source.read(size))
        begin = 8 + size
        header: dict[str, Any] = {}
        spans: list[tuple[int, int]] = []
        at = 0
        for name, tensor in told.items():
            renamed = _renumbered(name, kept)
            if renamed is None or name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            header[renamed] = {**tensor, "data_offsets": [at, at + end - first]}
            spans.append((begin + first, end - first))
            at += end - first
        embeddings = told[_EMBEDDINGS]
        first, end = embeddings["data_offsets"]
        header[_HEAD] = {**embeddings, "data_offsets": [at, at + end - first]}
        sink.write(_header(header))
        for offset, length in spans:
            source.seek(offset)
            sink.write(source.read(length))
        source.seek(begin + first)
        head = source.read(end - first)
        width = (end - first) // embeddings["shape"][0]
        rows = [head[row : row + width] for row in range(0, len(head), width)]
        for token in broken_tokens(model):
            # Between two others: whatever the model has to say, one of them is likelier.
            rows[token] = _mean(rows[5000 + token % 1000], rows[7000 + token % 1000])
        sink.write(b"".join(rows))
    return folder


def _mean(one: bytes, other: bytes) -> bytearray:
    """The mean of two rows of bfloat16, which is a float32 without its lower half."""
    found = bytearray()
    for at in range(0, len(one), 2):
        first, second = (struct.unpack("<f", bytes(2) + row[at : at + 2])[0] for row in (one, other))
        found += struct.pack("<f", (first + second) / 2)[2:]
    return found


def broken_tokens(model: Path) -> list[int]:
    """The ids of byte-level tokens that are no characters by themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    broken = []
    for token, number in tokenizer["model"]["vocab"].items():
        if not set(token) <= set(byte_of):
            continue
        # Some are the very sign that stands for broken ones.
        if "\ufffd" in bytes(byte_of[letter] for letter in token).decode(errors="replace"):
            broken.append(number)
    return broken


def _renumbered(name: str, kept: list[int]) -> str | None:
    """A tensor's name in a model of these layers alone; None if it is not part of it."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return name
    layer = int(parts[2])
    return ".".join(["model", "layers", str(kept.index(layer)), *parts[3:]]) if layer in kept else None


def _header(tensors: dict[str, Any]) -> bytes:
    """The beginning of a file of safetensors."""
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def with_thinking_tokens(model: Path, folder: Path) -> Path:
    """A copy of a model in whose tokenizer four idle tokens begin and end thoughts and tool calls."""
    folder.mkdir()
    for path in model.iterdir():
        text = path.read_text() if path.name == "tokenizer.json" else None
        if text is None:
            (folder / path.name).symlink_to(path.resolve())
            continue
        for old, new in RENAMED.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (folder / path.name).write_text(text)
    return folder


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter over all query projections that changes what a model of this shape says."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config["num_attention_heads"] * config["head_dim"]
    source = random.Random(seed)
    header: dict[str, object] = {}
    values = array("f")
    for layer in range(layers):
        for part, shape, scale in (("A", [RANK, hidden], 0.2), ("B", [width, RANK], 0.1)):
            begin = len(values) * 4
            values.extend(source.gauss(0, scale) for _ in range(shape[0] * shape[1]))
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(values) * 4]}
    folder.mkdir()
    adapter = folder / "adapter_model.safetensors"
    adapter.write_bytes(_header(header) + values.tobytes())
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": str(model)}))
    return folder
