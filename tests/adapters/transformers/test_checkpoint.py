"""A GGUF file becomes the Hugging Face folder that it was made from, whole or not at all."""

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(90)]

# Writes a llama GGUF of a Hugging Face folder, as llama.cpp's converter would: rows of q and k interleaved.
WRITE_GGUF = """
import json, sys, pathlib
import gguf, numpy as np
from safetensors.numpy import load_file

folder, target = pathlib.Path(sys.argv[1]), sys.argv[2]
config = json.loads((folder / "config.json").read_text())
tokenizer = json.loads((folder / "tokenizer.json").read_text())
writer = gguf.GGUFWriter(target, "llama")
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_block_count(config["num_hidden_layers"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_theta"])
vocabulary = tokenizer["model"]["vocab"]
tokens = sorted(vocabulary, key=vocabulary.get)
special = {t["id"] for t in tokenizer["added_tokens"]}
writer.add_tokenizer_model("gpt2")
writer.add_token_list(tokens)
writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
writer.add_bos_token_id(0)
writer.add_eos_token_id(2)
writer.add_pad_token_id(0)
writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
names = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
for name, value in load_file(folder / "model.safetensors").items():
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}.get(name)
    if outer is None:
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        if heads:
            n = config[heads]
            value = value.reshape(n, 2, value.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(value.shape)
        outer = f"blk.{layer}.{names[part]}.weight"
    writer.add_tensor(outer, np.ascontiguousarray(value.astype(np.float32)))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
COMPARE = """
import sys
from safetensors.torch import load_file
a, b = (load_file(f + "/model.safetensors") for f in sys.argv[1:])
assert a.keys() == b.keys(), a.keys() ^ b.keys()
assert all((a[n].bfloat16() == b[n]).all() for n in a)
assert any((a[n].float() != a[n].bfloat16().float()).any() for n in a)
"""
MODULE = "midstream.adapters.transformers.checkpoint"


def test_a_gguf_file_becomes_the_model_that_it_was(python: str, tiny: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "models" / "made"
    subprocess.run([python, "-c", WRITE_GGUF, str(tiny), str(source)], check=True, timeout=60)
    subprocess.run([python, "-m", MODULE, str(source), str(folder)], check=True, timeout=60)
    subprocess.run([python, "-c", COMPARE, str(tiny), str(folder)], check=True, timeout=60)
    made, old = (json.loads((f / "config.json").read_text()) for f in (folder, tiny))
    assert {k: v for k, v in made.items() if old.get(k) != v} == {"dtype": "bfloat16"}
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert [p.name for p in folder.parent.iterdir()] == ["made"]

    again = subprocess.run([python, "-m", MODULE, str(source), str(folder)], capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_what_is_no_gguf_leaves_nothing_behind(python: str, tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(b"GGUF but not really")
    done = subprocess.run(
        [python, "-m", MODULE, str(source), str(tmp_path / "made")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "cannot be read as GGUF" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
