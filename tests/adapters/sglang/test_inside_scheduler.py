"""The scheduler side on SGLang's own requests, batches, pages and caches, without a model: step by step."""

from pathlib import Path

import pytest

from support.sglang_inside import run_inside

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

# A scheduler of real parts: 20 pages of 64 tokens, and rows for four requests.
RIG = """
import types
from array import array
from pathlib import Path
import torch
from midstream.adapters.plugin_settings import PluginSettings
from midstream.adapters.prompt import prompt_hash
from midstream.adapters.sglang import marking, scheduler_hooks, scheduler_side
from midstream.session.arena import ArenaReader, LoadState, SlotState, create_arena
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume
from sglang.srt.managers.overlap_utils import FutureMap, resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.runtime_context import get_context, get_flags
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

PAGE, PAGES = 64, 20
PROMPT, OUTPUTS = list(range(1, 101)), tuple(range(200, 250))
POSITIONS = len(PROMPT) + len(OUTPUTS) - 1
A, B, C = (SessionId(letter * 32) for letter in "abc")

class Options:
    enable_deterministic_inference, stream_interval, page_size = True, 1, PAGE
    disaggregation_mode, dcp_size = "null", 1

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: False) if name.startswith("enable_mamba") else None

class Tokenizer:
    eos_token_id, additional_stop_token_ids = 2, None

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)

class Rig:
    def __init__(self, cache):
        self.sent, self.queued = [], []
        self.rows = ReqToTokenPool(size=4, max_context_len=512, device="cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(
            PAGE * PAGES, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        pools = {"req_to_token_pool": self.rows, "token_to_kv_pool_allocator": self.allocator}
        self.cache = cache(CacheInitParams(disable=False, page_size=PAGE, **pools))
        spec = SpeculativeAlgorithm.from_string(None)
        streamer = SchedulerOutputStreamer(
            send_to_detokenizer=types.SimpleNamespace(send_output=lambda payload, *_: self.sent.append(payload)),
            tree_cache=self.cache, ps=types.SimpleNamespace(dp_rank=None, attn_tp_rank=0), server_args=options,
            is_generation=True, spec_algorithm=spec, disaggregation_mode=None, enable_hicache_storage=lambda: False,
        )
        path = Path(f"{cache.__name__}.arena")
        create_arena(path, slot_count=8, page_count=64)
        self.scheduler = types.SimpleNamespace(
            ps=types.SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=None), tree_cache=self.cache,
            model_config=types.SimpleNamespace(think_end_id=None, vocab_size=1000, is_encoder_decoder=False),
            output_streamer=streamer, running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            enable_overlap=False, spec_algorithm=spec, server_args=options, last_batch=None, cur_batch=None,
            future_map=FutureMap("cpu", spec, self.rows, True), waiting_queue=[], chunked_req=None,
            grammar_manager=types.SimpleNamespace(grammar_queue=[]), **pools,
        )
        settings = PluginSettings("w", 1, Path("holder"), path, None, 5.0)
        self.side = scheduler_side.SchedulerSide(settings, self.scheduler, self.queued.append)
        scheduler_hooks._side = self.side
        self.reader = ArenaReader(path)

    def request(self, session, resume=None, generation=2, **params):
        asked = {"max_new_tokens": 80, "temperature": 0, **params}
        made = SamplingParams(**marking.with_marker(asked, Marker(session, generation, resume)))
        made.normalize(Tokenizer())
        request = Req(session[:4], None, array("q", PROMPT), made, stream=True, vocab_size=1000, eos_token_ids={2})
        request.tokenizer = Tokenizer()
        return request

    def resume(self, kv=KvSource.HELD, finish="", outputs=OUTPUTS):
        return Resume(outputs, kv, prompt_hash(PROMPT), finish)

    def slot(self, session):
        return self.reader.find(session)

    def check_pages(self):
        free = self.allocator.available_size()
        running = [r for r in self.scheduler.running_batch.reqs if r.req_pool_idx is not None]
        owned = sum(-(-r.kv_allocated_len // PAGE) * PAGE for r in running)
        assert free + owned + self.side.held_tokens == PAGE * PAGES, (free, owned, self.side.held_tokens)

options = Options()
get_context().set_server_args(options)
get_flags().attn.backend = "torch_native"
marking.draw_field()
scheduler_side.facts_of = lambda scheduler: ({"v": 1, "pools": ["w/1/0"]}, False)
scheduler_hooks.install()
"""

TAKEN_UP = """
for cache in (ChunkCache, RadixCache):
    rig = Rig(cache)
    request = rig.request(A, rig.resume(), frequency_penalty=0.5, min_new_tokens=60)
    assert rig.side.arrives(request)
    # The replay, before any KV is there.
    assert list(rig.sent[-1].output_ids[0]) == list(OUTPUTS) and rig.sent[-1].completion_tokens == [len(OUTPUTS)]
    rig.side.before_step()
    assert rig.slot(A).load is LoadState.WAITING and rig.side.is_waiting and rig.side.held_rows == 1
    assert len(rig.reader.table(rig.slot(A)).blocks) == 3
    rig.check_pages()
    rig.reader.answer(rig.slot(A), LoadState.DONE, POSITIONS)
    rig.side.before_step()
    slot, batch = rig.slot(A), rig.scheduler.running_batch
    assert (slot.load, slot.loaded, slot.recomputed) == (LoadState.DONE, POSITIONS, 1)
    assert batch.reqs == [request] and rig.side.held_tokens == 0 and not rig.side.is_waiting
    counted = {type(p).__name__: p for p in batch.sampling_info.penalizer_orchestrator.penalizers.values()}
    penalties = counted["BatchedFrequencyPenalizer"].cumulated_frequency_penalties
    assert penalties.sum() == 0.5 * (len(OUTPUTS) - 1)
    # The first decode computes the newest output's KV, in the next slot of its own pages.
    batch.prepare_for_decode()
    resolve_forward_inputs(batch, rig.scheduler.future_map)
    assert batch.input_ids.tolist() == [OUTPUTS[-1]] and batch.seq_lens.tolist() == [POSITIONS + 1]
    assert batch.out_cache_loc.tolist() == [rig.reader.table(slot).blocks[2] * PAGE + POSITIONS % PAGE]
    assert penalties.sum() == 0.5 * len(OUTPUTS)
    assert counted["BatchedMinNewTokensPenalizer"].len_output_tokens.tolist() == [[len(OUTPUTS)]]
    request.output_ids.append(333)
    request.update_finish_state()
    rig.scheduler.output_streamer.stream_output(batch.reqs, False)
    assert rig.reader.journal(rig.slot(A)) == [*OUTPUTS, 333] and rig.reader.kv_len(rig.slot(A)) == POSITIONS + 1
    assert list(rig.sent[-1].output_ids[0]) == [333]
    rig.check_pages()
    # Retracted: its pages are another's, so it has none.
    batch.release_req(0, 0, options)
    assert rig.reader.table(rig.slot(A)).blocks == () and rig.reader.kv_len(rig.slot(A)) == 0
    assert rig.allocator.available_size() == PAGE * PAGES
    assert rig.reader.counters()["hook_errors"] == 0
"""

ENDINGS = """
rig = Rig(ChunkCache)
whole = tuple(range(200, 280))
assert rig.side.arrives(rig.request(A, rig.resume(KvSource.NONE, "length", whole)))
assert rig.slot(A).state is SlotState.FINISHED and rig.slot(A).finish == "length"
assert rig.sent[-1].finished_reasons == [{"type": "length", "length": 80}]
assert list(rig.sent[-1].output_ids[0]) == list(whole)
# The record says nothing of an end, but the outputs have one.
assert rig.side.arrives(rig.request(B, rig.resume(KvSource.HELD, "", (*OUTPUTS, 2))))
assert rig.slot(B).finish == "stop" and rig.sent[-1].finished_reasons == [{"type": "stop", "matched": 2}]
# The record says that it ended, but nothing in the outputs does.
assert rig.side.arrives(rig.request(C, rig.resume(KvSource.NONE, "stop")))
assert rig.slot(C).finish == "abort" and rig.sent[-1].finished_reasons[0]["type"] == "abort"
assert rig.queued == [] and rig.side.held_tokens == 0 and not rig.side.is_waiting

class Grammar:
    current_token = None

    def __init__(self, accepts):
        self.accepts, self.seen = accepts, []

    def accept_token(self, token):
        if token not in self.accepts:
            raise ValueError("not in the grammar")
        self.seen.append(token)

    def is_terminated(self):
        return False

for generation, accepts, taken in ((3, set(OUTPUTS), False), (4, set(OUTPUTS[:-1]), True), (5, set(), True)):
    request = rig.request(A, rig.resume(KvSource.NONE), generation)
    request.grammar = Grammar(accepts)
    assert rig.side.arrives(request) is taken
    rig.side._tracked.clear()
    if taken:
        assert request.finished_reason.to_json()["type"] == "abort"
    else:
        assert request.grammar.seen == list(OUTPUTS) and request.grammar.current_token == OUTPUTS[-1]
"""

OTHERWISE = """
rig = Rig(ChunkCache)
# Another prompt, another engine's outputs: nothing of it is offered, and the request is SGLang's to compute.
other = Resume(OUTPUTS, KvSource.HELD, "0" * 32)
request = rig.request(A, other)
assert not rig.side.arrives(request) and list(request.output_ids) == list(OUTPUTS)
assert rig.slot(A).load is LoadState.FAILED
# Sampling whose state nothing rebuilds.
rig.side._deterministic = False
assert not rig.side.arrives(rig.request(B, rig.resume(), temperature=0.7))
assert rig.slot(B).load is LoadState.FAILED
assert rig.side.arrives(rig.request(C, rig.resume()))
rig.side.before_step()
# Aborted on its way in: SGLang does not know it, and its pages wait for the mover.
gone = rig.side.aborted(types.SimpleNamespace(rid=C[:4], abort_all=False))
assert [r.rid for r in gone] == [C[:4]] and rig.slot(C).finish == "abort"
assert rig.side.held_tokens == 3 * PAGE and rig.rows.available_size() == 4
# What was dropped without a word is over, too.
rig.side._looked_s = 0.0
rig.side.before_step()
assert rig.slot(A).finish == rig.slot(B).finish == "abort"
# Markers that cannot be true run as new requests.
for wrong in (rig.resume(outputs=(5000,)), rig.resume(outputs=tuple(range(81)))):
    request = rig.request(A, wrong, 9)
    assert not scheduler_hooks._arrives(rig.side, request) and len(request.output_ids) == 0
assert rig.reader.counters()["hook_errors"] == 2
rig.allocator.clear()
rig.check_pages()
"""

# Two schedulers of one engine are given the same requests: what they make of them must be the same.
RANKS = """
from midstream.adapters.sglang.follower import Follower

def made_of(rig, side, request, name):
    before = len(rig.sent)
    queued = not side.arrives(request)
    sent = [(list(told.output_ids[0]), told.finished_reasons) for told in rig.sent[before:]]
    return name, queued, list(request.output_ids), request.finished(), sent

first, beside = Rig(RadixCache), Rig(ChunkCache)
# An engine of several ranks has no pool that it offers.
first.side.facts["pools"] = []
follower = Follower(beside.scheduler)
whole = tuple(range(200, 280))
asked = {
    "new": {}, "kv": {"resume": first.resume()}, "none": {"resume": first.resume(KvSource.NONE)},
    "ended": {"resume": first.resume(KvSource.NONE, "length", whole)},
    "impossible": {"resume": first.resume(outputs=(5000,))},
}
for name, more in asked.items():
    try:
        one = made_of(first, first.side, first.request(A, **more), name)
    except ValueError as error:
        one = str(error)
    try:
        other = made_of(beside, follower, beside.request(A, **more), name)
    except ValueError as error:
        other = str(error)
    assert one == other, (one, other)
    assert first.side._tracked.clear() is None
assert not first.side.is_waiting and first.side.held_tokens == 0

# Where the first one cannot write to its arena any more, it still does what the others do.
def full(*_):
    raise OSError("no arena")

first.side._arena.admit = full
one = made_of(first, first.side, first.request(B, first.resume()), "")
assert one == made_of(beside, follower, beside.request(B, beside.resume()), ""), one
assert one[2] == list(OUTPUTS) and one[4]

class Info:
    def __init__(self):
        self.penalizer_orchestrator = types.SimpleNamespace(penalizers={}, is_required=True, device="cpu")

counted = []
from midstream.adapters.sglang import penalties
penalties.catch_up = lambda orchestrator, row, outputs: counted.append((row, list(outputs)))
for rig, side in ((first, first.side), (beside, follower)):
    requests = [rig.request(C, rig.resume(KvSource.NONE)), rig.request(A)]
    for request in requests:
        side.arrives(request)
    rig.scheduler.running_batch.reqs = requests
    batch = types.SimpleNamespace(reqs=requests, forward_mode=types.SimpleNamespace(is_prebuilt=lambda: False))
    side.sampling_begins(batch, Info())
assert counted == [(0, list(OUTPUTS))] * 2, counted
"""

# A loop's own: one result waits while the next step is made.
OVERLAPPED = """
import types
from collections import deque
from midstream.adapters import guard
from midstream.adapters.sglang import overlap
from sglang.srt.managers.scheduler import Scheduler

processed = []
Scheduler.process_batch_result = lambda self, batch, result: processed.append((batch, result))

def batch(required):
    orchestrator = types.SimpleNamespace(is_required=required)
    return types.SimpleNamespace(reqs=[1], sampling_info=types.SimpleNamespace(penalizer_orchestrator=orchestrator))

def scheduler(overlapped=True, running=False, last=False, queue=(("batch", "result"),)):
    made = object.__new__(Scheduler)
    made.enable_overlap, made.result_queue = overlapped, deque(queue)
    made.running_batch, made.last_batch = batch(running), batch(last)
    return made

def settled(made, session_waits=False):
    del processed[:]
    overlap.settle(made, session_waits=session_waits)
    return processed == [("batch", "result")]

assert not settled(scheduler(), True), "without the hook the loop would process it again"
overlap.install()
assert guard.missing == []
assert not settled(scheduler()) and not settled(scheduler(overlapped=False), True)
assert not settled(scheduler(queue=()), True)
assert settled(scheduler(running=True)) and settled(scheduler(last=True))
made = scheduler()
made.last_batch = None
assert settled(made, True) and len(made.result_queue) == 1
# Once is enough; and SGLang's loop finds something to take, of which nothing comes.
assert not settled(made, True)
made.process_batch_result(*made.result_queue.popleft())
assert processed == [] and not made.result_queue
made.process_batch_result("next", "one")
assert processed == [("next", "one")]

# What fails in SGLang's own function is SGLang's to see.
def fails(self, batch, result):
    raise RuntimeError("of SGLang's own")

Scheduler.process_batch_result = fails
overlap.install()
try:
    settled(scheduler(), True)
    raise SystemExit("it was hidden")
except RuntimeError:
    pass
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TAKEN_UP, id="a session that is taken up goes on in its own pages"),
        pytest.param(ENDINGS, id="what its outputs end is told so and never computed"),
        pytest.param(OTHERWISE, id="what cannot be taken up is computed, or over"),
        pytest.param(RANKS, id="ranks make the same of a request"),
    ],
)
def test_inside(program: str, tmp_path: Path) -> None:
    run_inside(RIG + program, tmp_path)


def test_a_step_comes_to_its_end_before_a_session_joins_or_penalties_are_counted(tmp_path: Path) -> None:
    run_inside(OVERLAPPED, tmp_path)
