"""A detokenizer that begins with the end of its prompt says what one says that has decoded all of it."""

import os
import subprocess
from pathlib import Path

import pytest

from midstream.sidecar import plugin_path
from midstream.sidecar.environments import VLLM_ENVIRON
from support.vllm_rig import MODEL_VARIABLE, PYTHON_VARIABLE

# Prompts and outputs of random tokens: words, halves and thirds of characters, special tokens.
PROGRAM = """
import random, sys, types
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from midstream.adapters.vllm.prompt_tail import TAIL_TOKENS, begin_with_tail

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
halves = [i for i in range(300) if "\ufffd" in tokenizer.decode([i])]
assert len(halves) > 100
emoji = [tokenizer.encode(c) for c in "😀🚀🌍é日本語"]
draw = random.Random(1)

def piece():
    kind = draw.random()
    if kind < 0.6:
        return [draw.randrange(300, 40000)]
    if kind < 0.9:
        return draw.choice(emoji)
    return [draw.choice(halves)] if kind < 0.97 else [draw.randrange(0, 17)]

def ids(count):
    found = []
    while len(found) < count:
        found += piece()
    return found[:count]

def new(prompt, skips):
    params = SamplingParams(skip_special_tokens=skips)
    request = types.SimpleNamespace(request_id="r", sampling_params=params, prompt_token_ids=prompt)
    return FastIncrementalDetokenizer(tokenizer, request)

short = 0
for case in range(600):
    prompt, outputs, skips = ids(draw.choice([30, 65, 200, 700])), ids(draw.choice([1, 5, 40])), case % 2 == 0
    whole, tail = new(prompt, skips), new(prompt, skips)
    before = tail.stream
    begin_with_tail(tail, prompt)
    short += tail.stream is not before
    assert len(prompt) > TAIL_TOKENS or tail.stream is before
    at = draw.randrange(len(outputs) + 1)
    for part in (outputs[:at], outputs[at:]):
        assert whole.update(list(part), False) == tail.update(list(part), False)
        assert whole.output_text == tail.output_text, (case, prompt, outputs)
print("equal", short)
"""


@pytest.mark.engine
@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_the_text_is_the_same_to_the_byte(tmp_path: Path) -> None:
    python, model = os.environ.get(PYTHON_VARIABLE), os.environ.get(MODEL_VARIABLE)
    if not python or not model:
        pytest.skip(f"{PYTHON_VARIABLE} or {MODEL_VARIABLE} is not set; `make test` sets both")
    environ = {**os.environ, **VLLM_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(tmp_path))}
    told = subprocess.run([python, "-c", PROGRAM, model], env=environ, capture_output=True, text=True, timeout=170)
    assert told.stdout.splitlines()[-1:], told.stderr[-2000:]
    word, short = told.stdout.splitlines()[-1].split()
    assert word == "equal"
    # Of the longer prompts many neither begin nor end with half a character.
    assert int(short) > 150
