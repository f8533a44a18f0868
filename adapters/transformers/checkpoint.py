"""A llama-architecture GGUF file into a Hugging Face folder: `python -m midstream.adapters.transformers.checkpoint`.

Owns the translation of names, of the row order of q and k, and of the tokenizer. Weights are dequantized to bfloat16.
Invariant: the folder appears whole or not at all. Only byte-level BPE tokenizers (`gpt2` in GGUF) are translated.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

from ...session.errors import EngineError, MidstreamError

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token types; everything that is not normal text is a special token.
_NORMAL = 1
# Pre-tokenizers that split off single digits before the byte-level step.
_DIGIT_SPLITTING = ("smollm", "starcoder", "refact", "command-r")


class Source:
    """An opened GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: cannot be read as GGUF ({error}); give a .gguf file") from error
        self.path = path
        found = self.field("general.architecture")
        if found != "llama":
            raise EngineError(f"{path}: architecture {found!r}; only llama can be translated")
        kind = self.field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise EngineError(f"{path}: tokenizer {kind!r}; only byte-level BPE (gpt2) can be translated")

    @property
    def tensors(self) -> Any:
        """The tensors, as gguf reads them."""
        return self._reader.tensors

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value; EngineError when it is missing and there is no default."""
        found = self._reader.fields.get(name)
        if found is None:
            if default is None:
                raise EngineError(f"{self.path}: field {name} is missing; the file is not whole")
            return default
        return found.contents()


def convert(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file. EngineError says what cannot be translated."""
    file = Source(source)

    def write(into: Path) -> None:
        weights = _weights(file)
        save_file(weights, str(into / "model.safetensors"), metadata={"format": "pt"})
        for name, body in {
            "config.json": _config(file, tied="lm_head.weight" not in weights),
            "generation_config.json": _special_ids(file),
            "tokenizer.json": _tokenizer(file),
            "tokenizer_config.json": _tokenizer_config(file),
        }.items():
            write_json(into / name, body)

    publish(folder, write)


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `folder`, then give it its name. EngineError when something is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        raise EngineError(f"{folder} exists already; remove it or choose another folder")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
        try:
            temporary.rename(folder)
        except OSError as error:
            raise EngineError(f"{folder}: {error.strerror}; another process was faster, or it is not ours") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, body: object) -> None:
    """A JSON file as Hugging Face writes it."""
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1), encoding="utf-8")


def _weights(file: Source) -> dict[str, torch.Tensor]:
    heads, kv_heads = file.field("llama.attention.head_count"), file.field("llama.attention.head_count_kv")
    reordered = {"attn_q": heads, "attn_k": kv_heads}
    weights = {}
    for tensor in file.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _OUTER.get(tensor.name)
        if name is None:
            parts = tensor.name.split(".")
            if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _INNER or parts[3] != "weight":
                raise EngineError(f"{file.path}: tensor {tensor.name} is not one of a plain llama")
            if parts[2] in reordered:
                value = rows_of_halves(value, reordered[parts[2]])
            name = f"model.layers.{parts[1]}.{_INNER[parts[2]]}.weight"
        weights[name] = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16)
    return weights


def rows_of_halves(weight: Any, heads: int) -> Any:
    """GGUF interleaves the two halves of each head's rotary dimensions; Hugging Face has them one after the other."""
    rows = weight.shape[0]
    split = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _special_ids(file: Source) -> dict[str, int]:
    end = int(file.field("tokenizer.ggml.eos_token_id"))
    return {
        "bos_token_id": int(file.field("tokenizer.ggml.bos_token_id", end)),
        "eos_token_id": end,
        "pad_token_id": int(file.field("tokenizer.ggml.padding_token_id", end)),
    }


def _config(file: Source, *, tied: bool) -> dict[str, Any]:
    heads, hidden = file.field("llama.attention.head_count"), file.field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.field("llama.feed_forward_length"),
        "num_hidden_layers": file.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": file.field("llama.context_length"),
        "vocab_size": len(file.field("tokenizer.ggml.tokens")),
        # A float32 field: 1e-05 comes as 9.99999974e-06.
        "rms_norm_eps": float(f"{file.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(file.field("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(file),
    }


def _tokenizer(file: Source) -> dict[str, Any]:
    tokens, kinds = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    special = [index for index, kind in enumerate(kinds) if kind != _NORMAL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split: dict[str, Any] = byte_level
    if file.field("tokenizer.ggml.pre", "default") in _DIGIT_SPLITTING:
        split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [added_token(index, tokens[index]) for index in special],
        "pre_tokenizer": split,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": bpe(
            {token: index for index, token in enumerate(tokens)},
            [merge.split(" ", 1) for merge in file.field("tokenizer.ggml.merges")],
        ),
    }


def added_token(index: int, content: str) -> dict[str, Any]:
    """A special token as tokenizer.json has it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """A byte-level BPE model as tokenizer.json has it."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _tokenizer_config(file: Source) -> dict[str, Any]:
    tokens, ids = file.field("tokenizer.ggml.tokens"), _special_ids(file)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(file.field("tokenizer.ggml.unknown_token_id", ids["eos_token_id"]))],
        "model_max_length": file.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": file.field("tokenizer.chat_template", ""),
    }


def main(argv: list[str] | None = None) -> int:
    """Convert one file; 2 when it cannot be done."""
    parser = argparse.ArgumentParser(prog="midstream.adapters.transformers.checkpoint", description=__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="the Hugging Face folder to make")
    args = parser.parse_args(argv)
    try:
        convert(args.gguf, args.folder)
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
