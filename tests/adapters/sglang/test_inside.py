"""What is done to SGLang's own objects, done to real ones, in its own Python and without a model."""

import os
import subprocess
from pathlib import Path

import pytest

from midstream.sidecar import plugin_path
from midstream.sidecar.environments import SGLANG_ENVIRON
from support.sglang_rig import sglang_python

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
from midstream.adapters.sglang.penalties import all_known, catch_up
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
"""

HOOKS = """
import os
from midstream.adapters.sglang import front_end, marking, pool, scheduler_hooks
from midstream.adapters import guard

marking.draw_field()
front_end.install(), pool.install(), scheduler_hooks.install()
assert guard.missing == [], guard.missing
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(HASH, id="the hash of seeded sampling is the kernel's"),
        pytest.param(PAGES_OF_ROWS, id="rows get the pages that the kernels would give them"),
        pytest.param(HELD_PAGES, id="a page that is held is in no free list"),
        pytest.param(PENALTIES, id="outputs count as if they had come one by one"),
        pytest.param(HOOKS, id="every hook fits"),
    ],
)
def test_inside(program: str, tmp_path: Path) -> None:
    environ = {**os.environ, **SGLANG_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(tmp_path))}
    told = subprocess.run(
        [sglang_python(), "-c", f"{program}\nprint('done')"], env=environ, capture_output=True, text=True, timeout=170
    )
    assert told.stdout.splitlines()[-1:] == ["done"], told.stderr[-3000:]
