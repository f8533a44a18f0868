"""What is done to SGLang's own objects, done to real ones, in its own Python and without a model."""

from pathlib import Path

import pytest

from support.sglang_inside import run_inside

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

HASH = """
import torch
from sglang.srt.layers.utils.hash import murmur_hash32

def rotated(x, bits):
    return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

def wanted(seed, position, column):
    h = 0
    for key in (seed & 0xFFFFFFFF, seed >> 32, position, column):
        h ^= rotated(key * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = rotated(h, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16

seeds, positions, columns = [0, 42, 7, 2**63 - 1, 12345678901], [0, 1, 2, 4000, 99999], list(range(0, 49152, 997))
got = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
assert got.tolist() == [[wanted(s, p, c) for c in columns] for s, p in zip(seeds, positions)]
"""

# SGLang has the same in Python for another kind of hardware.
PAGES_OF_ROWS = """
import random
import torch
from sglang.srt.mem_cache.allocator import paged

for seed in range(300):
    chance = random.Random(seed)
    size, rows = chance.choice([2, 16, 64]), chance.randint(1, 4)
    before = [chance.choice([0, chance.randint(1, 200)]) for _ in range(rows)]
    after = [n + chance.randint(1, 200) for n in before]
    last = [chance.randint(0, 50) * size + (n - 1) % size if n else -1 for n in before]
    before, after, last = map(torch.tensor, (before, after, last))
    free = torch.randperm(2000) + 100
    theirs, ours = (torch.empty(int((after - before).sum()), dtype=torch.int64) for _ in range(2))
    paged.alloc_extend_naive(before, after, last, free, theirs, size, "cpu")
    paged.alloc_extend_kernel[(rows,)](before, after, last, free, ours, 4, size)
    assert torch.equal(theirs, ours), seed
    one, other = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    paged.alloc_extend_naive(after - 1, after, torch.where(after > 1, last.abs() * size + (after - 2) % size, -1), free,
                             one, size, "cpu")
    paged.alloc_decode_kernel[(rows,)](after, torch.where(after > 1, last.abs() * size + (after - 2) % size, -1), free,
                                       other, 4, size)
    assert torch.equal(one, other), seed
"""

HELD_PAGES = """
import torch
from midstream.adapters.sglang.pages import Pages
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

allocator = PagedTokenToKVPoolAllocator(
    64 * 10, page_size=64, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
)
pages = Pages(allocator, None)
free = lambda: sorted(allocator.free_pages.tolist())
assert free() == list(range(1, 11))
assert pages.take(3) == [1, 2, 3] and pages.held_tokens == 192 and free() == list(range(4, 11))
assert pages.take(8) is None and pages.held_tokens == 192
assert pages.take_these([9, 3, 5]) and free() == [4, 6, 7, 8, 10]
allocator.alloc(64)
assert not pages.take_these([4, 6]) and free() == [6, 7, 8, 10]
pages.hand_over([1])
pages.give_back([1, 2, 9])
assert free() == [2, 6, 7, 8, 9, 10] and pages.held_tokens == 128
allocator.clear()
pages.keep_out()
assert free() == [1, 2, 4, 6, 7, 8, 9, 10]
assert allocator.available_size() + pages.held_tokens == 640
"""

PENALTIES = """
import random
import types
import torch
from midstream.adapters.sglang.penalties import KNOWN, all_known, catch_up, put_in_order
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

assert all_known(SamplingBatchInfo)
assert not all_known(types.SimpleNamespace(from_schedule_batch=catch_up))
KINDS = {
    penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer, penaltylib.BatchedRepetitionPenalizer,
}

def request(frequency, presence, repetition, least):
    params = types.SimpleNamespace(frequency_penalty=frequency, presence_penalty=presence,
                                   repetition_penalty=repetition, min_new_tokens=least, stop_token_ids={5})
    tokenizer = types.SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
    return types.SimpleNamespace(sampling_params=params, tokenizer=tokenizer)

class Batch:
    device = "cpu"
    reqs = [request(0.7, 0.3, 1.1, 50), request(0.0, 0.0, 1.0, 0), request(-0.1, 2.0, 0.9, 10)]

def orchestrator(batch):
    return penaltylib.BatchedPenalizerOrchestrator(50, batch, KINDS)

chance, batch = random.Random(3), Batch()
outputs = [chance.choices(range(50), k=30) for _ in batch.reqs]
theirs, ours = orchestrator(batch), orchestrator(batch)
for step in zip(*outputs):
    theirs.cumulate_output_tokens(torch.tensor(step))
for row, tokens in enumerate(outputs):
    catch_up(ours, row, tokens)
for one, other in ((theirs, ours), (orchestrator(batch), orchestrator(batch))):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    copy = logits.clone()
    one.apply(logits), other.apply(copy)
    assert torch.equal(logits, copy)

class Plain:
    device = "cpu"
    reqs = [request(0.0, 0.0, 1.0, 0)]

plain = Plain()
catch_up(orchestrator(plain), 0, [1, 2])

# Whichever order a process has its classes in, the numbers are the same to the last bit.
seen, orders = set(), set()
for _ in range(20):
    classes = chance.sample(sorted(KINDS, key=lambda kind: kind.__name__), len(KINDS))
    mixed = penaltylib.BatchedPenalizerOrchestrator(50, batch, classes)
    orders.add(tuple(mixed.penalizers))
    put_in_order(mixed)
    assert [kind.__name__ for kind in mixed.penalizers] == list(KNOWN)
    for step in zip(*outputs):
        mixed.cumulate_output_tokens(torch.tensor(step))
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    mixed.apply(logits)
    seen.add(logits.numpy().tobytes())
assert len(orders) > 1 and len(seen) == 1
"""

HOOKS = """
import os
from midstream.adapters.sglang import draws, front_end, marking, pool, scheduler_hooks
from midstream.adapters import guard

marking.draw_field()
front_end.install(), pool.install(), scheduler_hooks.install()
draws.install_in_scheduler(), draws.install_in_front_end()
assert guard.missing == [], guard.missing
"""


DRAWS = """
import types
import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from midstream.adapters import guard
from midstream.adapters.sglang import draws

draws.install_in_scheduler(), draws.install_in_front_end()
by_rank = sampler.top_k_top_p_min_p_sampling_from_probs_torch
torch.manual_seed(1)
probs = torch.softmax(3 * torch.randn(40, 5000), -1)
tied = probs[0].clone()
tied[[4000, 17, 900]] = 0.2
rows = {
    "greedy": (1, 1.0), "plain": (TOP_K_ALL, 1.0), "top_k": (30, 1.0), "top_p": (TOP_K_ALL, 0.8), "both": (50, 0.9),
}

def draw(names, probs):
    asked = [rows[name] for name in names]
    if all(k <= 1 for k, _ in asked):
        return probs.argmax(-1).tolist()
    seeds = torch.tensor([7] * len(names))
    positions = torch.tensor([33] * len(names))
    if all(name == "plain" for name in names):
        return sampler.sampling_from_probs_torch(probs, seeds, positions).tolist()
    ks, ps = torch.tensor([k for k, _ in asked]), torch.tensor([p for _, p in asked])
    return by_rank(probs, ks, ps, torch.zeros(len(names)), False, seeds, positions).tolist()

seen = set()
for row in [*probs, tied]:
    alone = [draw([name], row[None])[0] for name in rows]
    assert draw(list(rows), row.repeat(len(rows), 1)) == alone
    assert draw([*rows, "plain"], row.repeat(len(rows) + 1, 1)) == [*alone, alone[1]]
    seen.add(tuple(alone))
assert len({by_token for _, by_token, *_ in seen}) > 10, "nothing was drawn"
seeds, positions, all_of_them = torch.full((40,), 7), torch.full((40,), 33), torch.full((40,), TOP_K_ALL)
ranked = by_rank.__wrapped__(probs, all_of_them, torch.ones(40), torch.zeros(40), False, seeds, positions)
assert ranked.tolist() != sampler.sampling_from_probs_torch(probs, seeds, positions).tolist()
assert guard.missing == []

options = types.SimpleNamespace(enable_deterministic_inference=True)
draws.server_options = lambda: options
def refused(**params):
    made = SamplingParams(**params)
    try:
        made.verify(5000)
    except ValueError as error:
        return str(error)
    return ""
assert "top_p" in refused(min_p=0.1) and not refused(top_p=0.9) and "min_p" in refused(min_p=3.0)
options.enable_deterministic_inference = False
assert not refused(min_p=0.1)
"""


FRONT_END = """
import asyncio
import json
import types
import msgspec
from midstream.adapters.sglang import front_end, marking
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume, with_marker
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.requests import Request

IDS, TEXTS = [5, 6, 7, 8], ["On", "On", "Once", "Once upon"]
asked, aborted = [], []

async def outputs(self, obj, request=None):
    obj.normalize_batch_and_arguments()
    asked.append(obj)
    told = []
    for count, (token, text) in enumerate(zip(IDS, TEXTS), 1):
        told.append(token)
        reason = {"type": "length", "length": 4} if count == 4 else None
        meta = {"id": "r", "prompt_tokens": 2, "completion_tokens": count, "finish_reason": reason}
        meta["weight_version"] = "w"
        out = {"text": text, "output_ids": told, "meta_info": meta}
        if obj.return_prompt_token_ids:
            out["prompt_token_ids"] = [1, 2]
        if obj.stream or count == 4:
            yield out

TokenizerManager.generate_request = outputs
marking.draw_field()
front_end.install()
manager = object.__new__(TokenizerManager)
manager.server_args = types.SimpleNamespace(
    incremental_streaming_output=False, stream_response_default_include_usage=False, enable_cache_report=False
)
manager.request_logger = types.SimpleNamespace(log_requests=False)
manager.create_abort_task = lambda obj: None
manager.abort_request = aborted.append
completions = OpenAIServingCompletion(manager, types.SimpleNamespace(completion_template_name=None))
chat = object.__new__(OpenAIServingChat)
chat.tokenizer_manager, chat.reasoning_parser, chat.tool_call_parser = manager, None, None
MARKER = Marker(SessionId("a" * 32), 2, Resume((7, 8), KvSource.HELD, "0" * 32), seed=9)

def raw_request(body, path="/v1/completions"):
    raw = json.dumps(body).encode()
    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}
    return Request({"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
                    "server": ("h", 1), "scheme": "http"}, receive)

async def complete(body):
    answer = await completions.handle_request(CompletionRequest(**body), raw_request(body))
    if not body.get("stream"):
        return json.loads(answer.body) if hasattr(answer, "body") else answer.model_dump()
    return [json.loads(c[6:]) for c in [c async for c in answer.body_iterator] if c != "data: [DONE]\\n\\n"]

def marker_that_arrives(params):
    # As SGLang sends it from one process to the other.
    sent = msgspec.msgpack.encode(SamplingParams(**params))
    return marking.marker_of(types.SimpleNamespace(sampling_params=msgspec.msgpack.decode(sent, type=SamplingParams)))

def ids_of(chunks):
    return [c["choices"][0].get("token_ids") for c in chunks]

async def main():
    plain = {"prompt": "x", "stream": True, "custom_params": {"a": 1}}
    marked = with_marker(plain, MARKER)
    # Requests without a marker are SGLang's alone, also where they only look like one.
    for body in (plain, {**plain, "kv_transfer_params": {"midstream": {"v": 1, "session": "no"}}}):
        assert ids_of(await complete(body)) == [None] * 4
        assert asked[-1].sampling_params["custom_params"] == {"a": 1}
    chunks = await complete(marked)
    assert ids_of(chunks) == [[5], [6], [7], [8]]
    assert [c["choices"][0]["text"] for c in chunks] == ["On", "", "ce", " upon"]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[1, 2], None, None, None]
    params = asked[-1].sampling_params
    assert marker_that_arrives(params) == MARKER and params["custom_params"]["a"] == 1
    assert params["sampling_seed"] == 9
    assert aborted == [asked[-1].rid]
    whole = await complete({**marked, "stream": False})
    assert whole["choices"][0]["token_ids"] == IDS and whole["choices"][0]["text"] == "Once upon"
    assert (await complete({**plain, "stream": False}))["choices"][0].get("token_ids") is None

    # Whoever leaves in the midst is over at once.
    answer = await completions.handle_request(CompletionRequest(**marked), raw_request(marked))
    await answer.body_iterator.__anext__()
    await answer.body_iterator.aclose()
    await asyncio.sleep(0)
    import gc
    gc.collect()
    await asyncio.sleep(0.05)
    assert aborted[-1] == asked[-1].rid, aborted

    # Chats: what came without a text of its own comes with the next one, and the rest with the end.
    body = with_marker({"messages": [{"role": "user", "content": "x"}], "stream": True}, MARKER)
    adapted = GenerateReqInput(text="x", sampling_params={}, stream=True)
    raw = raw_request(body)
    raw.state.midstream = MARKER
    front_end._mark(chat, adapted, raw)
    told = [e async for e in chat._generate_chat_stream(adapted, ChatCompletionRequest(**body), raw)]
    chunks = [json.loads(e[6:]) for e in told if "[DONE]" not in e]
    assert ids_of(chunks) == [None, [5], [6, 7], [8], []], ids_of(chunks)
    assert [c["choices"][0]["delta"].get("content") for c in chunks][1:4] == ["On", "ce", " upon"]

    # SGLang's own endpoint: the marker goes in, and its events stay as they are.
    native = GenerateReqInput(text="x", sampling_params={"temperature": 0}, stream=True)
    events = [o async for o in manager.generate_request(native, raw_request(body, "/generate"))]
    assert marker_that_arrives(asked[-1].sampling_params) == MARKER
    assert asked[-1].sampling_params["temperature"] == 0 and "midstream" not in events[0]

asyncio.run(main())
"""

# A vocabulary of more than one word of the mask's bits, and a batch of which one row has no grammar.
MASKS = """
import types
from array import array
import torch
import xgrammar
from midstream.adapters.sglang.re_entry import re_enter
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

VOCABULARY = [chr(97 + n % 26) * (1 + n // 26) for n in range(78)] + ["1", "22", "</s>"]
SIZE, END = len(VOCABULARY), 80
info = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, vocab_size=SIZE, stop_token_ids=[END])
compiled = xgrammar.GrammarCompiler(info).compile_regex("(ab|cc)[a-b]1(22)?")
ids = {word: number for number, word in enumerate(VOCABULARY)}

def grammar():
    return XGrammarGrammar(xgrammar.GrammarMatcher(compiled), SIZE, compiled, None)

def allowed(grammar, other=None):
    mask = grammar.allocate_vocab_mask(SIZE, 2, "cpu")
    grammar.fill_vocab_mask(mask, 1)
    logits = torch.arange(2.0 * SIZE).reshape(2, SIZE)
    plain = logits.clone()
    grammar.apply_vocab_mask(logits=logits, vocab_mask=grammar.move_vocab_mask(mask, "cpu"))
    assert torch.equal(logits[0], plain[0]), "a row without a grammar is left alone"
    kept = logits[1] != float("-inf")
    assert torch.equal(logits[1][kept], plain[1][kept])
    return {VOCABULARY[n] for n in range(SIZE) if kept[n]}

class Request:
    # What a scheduler's request is to its outputs.
    return_logprob, require_reasoning, finished_reason, rid = False, False, None, "r"

    def __init__(self, grammar):
        self.grammar = grammar

    def update_finish_state(self):
        pass

    def finished(self):
        return self.finished_reason is not None

steps = ["a", "b", "a", "1", "22", "</s>"]
wanted = [{"a", "c", "cc"}, {"b", "bb"}, {"a", "b"}, {"1"}, {"22", "</s>"}, {"</s>"}]
one = grammar()
for count, (word, choice) in enumerate(zip(steps, wanted)):
    assert allowed(one) == choice, (count, allowed(one))
    # Whoever comes with the outputs so far may say the same.
    other = Request(grammar())
    assert not re_enter(other, [ids[w] for w in steps[:count]], "", None)
    assert allowed(other.grammar) == choice
    assert other.grammar.current_token == (ids[steps[count - 1]] if count else None)
    one.accept_token(ids[word])
assert one.is_terminated()
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(HASH, id="the hash of seeded sampling is the kernel's"),
        pytest.param(PAGES_OF_ROWS, id="rows get the pages that the kernels would give them"),
        pytest.param(HELD_PAGES, id="a page that is held is in no free list"),
        pytest.param(PENALTIES, id="outputs count as if they had come one by one"),
        pytest.param(HOOKS, id="every hook fits"),
        pytest.param(DRAWS, id="a request is drawn for as if it were alone"),
        pytest.param(MASKS, id="what a grammar rules out is masked, and that of old outputs goes on"),
        pytest.param(FRONT_END, id="the marker goes in and token ids come out"),
    ],
)
def test_inside(program: str, tmp_path: Path) -> None:
    run_inside(program, tmp_path)
