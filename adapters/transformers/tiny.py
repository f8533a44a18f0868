"""A tiny Llama with random weights for tests: `python -m midstream.adapters.transformers.tiny DIR`.

Owns the making of a model that loads in a second and still behaves like one where it matters: grouped-query attention,
a byte-level tokenizer with merges and a chat template, greedy outputs that do not run in circles, and text that is
valid UTF-8 with emoji, each of four tokens. It says nothing sensible.

How the text stays valid: four dimensions of the residual stream are kept out of the layers' reach. The embedding of a
byte says there which part of a character it is, and the output head lets only the bytes follow that continue it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...session.errors import MidstreamError
from .checkpoint import added_token, bpe, publish, write_json

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 128
CONTEXT_TOKENS = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "h e", "i n", "a n", "e r", "o n", "r e", "Ġ t", "th e", "Ġ a", "in g", "an d")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The reserved dimensions: always on; "an emoji has begun"; its second byte is out; its third byte is out.
_ALWAYS, _FIRST, _SECOND, _THIRD = range(4)
_RESERVED = 4
_SIGNAL = 5.0
_FORBID = 60.0
_LEAD = 0xF0
_SECONDS = frozenset({0x9F})
_THIRDS = frozenset({0x8E, 0x92, 0x98})
_FOURTHS = frozenset(range(0x80, 0xC0)) - _SECONDS - _THIRDS
_PRINTABLE = frozenset({0x0A, *range(0x20, 0x7F)})
# How much likelier an emoji is than another character.
_EMOJI_BIAS = 12.0
_AVERSION = 0.4


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (as GPT-2 defined it)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Token to id: the special tokens, the 256 bytes, the merges."""
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return {token: index for index, token in enumerate(tokens)}


def make(folder: Path, *, seed: int = 0, layers: int = 3) -> None:
    """Write the model folder; the same seed makes the same bytes."""

    def write(into: Path) -> None:
        weights = _weights(seed, layers, len(vocabulary()))
        save_file(weights, str(into / "model.safetensors"), metadata={"format": "pt"})
        write_json(into / "config.json", _config(layers))
        write_json(into / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0})
        write_json(into / "tokenizer.json", _tokenizer())
        write_json(into / "tokenizer_config.json", _tokenizer_config())

    publish(folder, write)


def _weights(seed: int, layers: int, vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    embeddings = normal(vocab, HIDDEN, 1.0)
    # The head turns away from the token that was just said, or it would be said again and again.
    head = normal(vocab, HIDDEN, 0.5) - _AVERSION * embeddings
    weights = {
        "model.embed_tokens.weight": _embeddings(embeddings),
        "lm_head.weight": _head(head),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        # Sharp attention and strong updates: what was said long ago changes what comes next, so nothing repeats.
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN, 0.2),
            f"{name}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, 0.2),
            f"{name}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, 0.2),
            f"{name}.self_attn.o_proj.weight": _unreserved(normal(HIDDEN, HEADS * HEAD_DIM, 0.25)),
            f"{name}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, 0.2),
            f"{name}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, 0.2),
            f"{name}.mlp.down_proj.weight": _unreserved(normal(HIDDEN, INTERMEDIATE, 0.15)),
        }
    return weights


def _unreserved(weight: torch.Tensor) -> torch.Tensor:
    """A projection that writes nothing to the reserved dimensions."""
    weight[:_RESERVED] = 0.0
    return weight


def _embeddings(weight: torch.Tensor) -> torch.Tensor:
    weight[:, :_RESERVED] = 0.0
    weight[:, _ALWAYS] = _SIGNAL
    for dimension, some in ((_FIRST, {_LEAD}), (_SECOND, _SECONDS), (_THIRD, _THIRDS)):
        weight[[_id(byte) for byte in some], dimension] = _SIGNAL
    return weight


def _head(weight: torch.Tensor) -> torch.Tensor:
    weight[:, :_RESERVED] = 0.0
    # Within a character everything is forbidden but what continues it ...
    weight[:, _FIRST : _THIRD + 1] = -_FORBID
    continuing = {_FIRST: _SECONDS, _SECOND: _THIRDS, _THIRD: _FOURTHS}
    for dimension, some in continuing.items():
        weight[[_id(byte) for byte in some], dimension] = 2 * _FORBID
    # ... and outside of one, what is no character of its own.
    unprintable = [_id(byte) for byte in range(256) if byte not in _PRINTABLE and byte != _LEAD]
    weight[[*range(len(SPECIAL)), *unprintable], _ALWAYS] = -_FORBID
    weight[_id(_LEAD), _ALWAYS] = _EMOJI_BIAS
    return weight


def _id(byte: int) -> int:
    return len(SPECIAL) + byte


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": len(vocabulary()),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [added_token(index, token) for index, token in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": bpe(vocabulary(), [merge.split(" ") for merge in MERGES]),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "unk_token": SPECIAL[0],
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def main(argv: list[str] | None = None) -> int:
    """Make one model; 2 when it cannot be done."""
    parser = argparse.ArgumentParser(prog="midstream.adapters.transformers.tiny", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args(argv)
    try:
        make(args.folder, seed=args.seed, layers=args.layers)
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
