"""What the demo's model lacks for tests: tokens to think and call tools with, and adapters of its own.

Owns the folders that it writes. Weights are linked, never copied; adapters are random and follow from their seed.
"""

import json
import random
from array import array
from pathlib import Path

# Tokens that the model has no use for, and what they are called instead.
RENAMED = {
    "<jupyter_start>": "<think>",
    "<jupyter_text>": "</think>",
    "<jupyter_code>": "<tool_call>",
    "<jupyter_output>": "</tool_call>",
}
THINK_END_ID = 12
RANK = 8


def with_thinking_tokens(model: Path, folder: Path) -> Path:
    """A copy of a model in whose tokenizer four idle tokens begin and end thoughts and tool calls."""
    folder.mkdir()
    for path in model.iterdir():
        text = path.read_text() if path.name == "tokenizer.json" else None
        if text is None:
            (folder / path.name).symlink_to(path)
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
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    adapter = folder / "adapter_model.safetensors"
    adapter.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": str(model)}))
    return folder
