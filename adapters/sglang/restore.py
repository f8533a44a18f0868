"""The way back in: sessions whose KV the mover brings, or that lies there already, join the running batch at once.

Owns the requests that wait for their KV, and the pages that are promised to the mover. Invariants: a page that was
promised is nobody else's before the mover has answered, or no mover can be alive that has not; a request joins only
with all of its KV, in pages of its own; every wait ends, with a prefill at worst. All methods are called by the
scheduler's one thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...session.arena import Counter
from ...session.arena_writer import ArenaWriter, SlotWriter
from ...session.marker import KvSource
from ...session.records import LoadState
from ..guard import report
from .pages import Pages
from .reservations import Reservations, Taken
from .tracked import Phase, Tracked, complete_positions

# A mover that is stopped for longer than any deadline of a restore is gone: its pages would be lost for good.
PROMISED_S_MAX = 600.0


@dataclass(slots=True)
class _Waiting:
    """A request on its way in: for room first, then for the mover."""

    tracked: Tracked
    until_s: float
    pages: list[int] | None = None
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class _Promised:
    """Pages of a load that timed out, to which the mover may still write."""

    slot: SlotWriter
    pages: list[int]
    until_s: float


class Restores:
    """Everything between a resumed request's arrival and its first step."""

    def __init__(
        self,
        scheduler: Any,
        arena: ArenaWriter,
        pages: Pages,
        *,
        load_timeout_s: float,
        without_kv: Callable[[Tracked], None],
    ) -> None:
        """`without_kv` has the scheduler compute a request whose KV did not come."""
        self._scheduler = scheduler
        self._arena = arena
        self._pages = pages
        self._load_timeout_s = load_timeout_s
        self._without_kv = without_kv
        self._waiting: list[_Waiting] = []
        self._promised: list[_Promised] = []
        self.reservations: Reservations | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def row_count(self) -> int:
        """How many rows of SGLang's table of requests are held by requests that are in no batch yet."""
        return sum(waiting.pages is not None for waiting in self._waiting)

    def begin(self, tracked: Tracked) -> None:
        """A request arrived whose KV is offered."""
        self._waiting.append(_Waiting(tracked, time.monotonic() + self._load_timeout_s))

    def has(self, tracked: Tracked) -> bool:
        """Whether the request is still on its way in."""
        return any(waiting.tracked is tracked for waiting in self._waiting)

    def step(self) -> None:
        """Go on with whatever can go on, before the scheduler makes its next batch."""
        for waiting in list(self._waiting):
            try:
                done = self._advance(waiting)
            except Exception:
                report("a session that is taken up")
                done = True
                # One that has joined is the scheduler's own.
                if waiting in self._waiting:
                    self._fall_back(waiting, answered=waiting.is_complete)
            if done and waiting in self._waiting:
                self._waiting.remove(waiting)
        self._free_answered()

    def give_up(self, tracked: Tracked) -> None:
        """The request is aborted: it needs nothing any more."""
        for waiting in [w for w in self._waiting if w.tracked is tracked]:
            self._waiting.remove(waiting)
            self._let_go(waiting, answered=waiting.is_complete)

    def _advance(self, waiting: _Waiting) -> bool:
        """Whether the request is on its way in no more."""
        tracked = waiting.tracked
        if not tracked.slot.alive:
            self._fall_back(waiting, answered=False)
            return True
        if waiting.pages is None and not self._find_room(waiting):
            return self._is_late(waiting)
        if waiting.is_complete:
            self._join(waiting)
            return True
        state, tokens = tracked.slot.inbox()
        if state is LoadState.NONE:
            return self._is_late(waiting)
        if state is LoadState.DONE and tokens >= complete_positions(tracked.request):
            self._join(waiting)
        else:
            self._fall_back(waiting, answered=True)
        return True

    def _is_late(self, waiting: _Waiting) -> bool:
        if time.monotonic() < waiting.until_s:
            return False
        if waiting.pages is not None:
            self._arena.count(Counter.LOADS_TIMED_OUT)
        self._fall_back(waiting, answered=False)
        return True

    def _find_room(self, waiting: _Waiting) -> bool:
        tracked, scheduler = waiting.tracked, self._scheduler
        request = tracked.request
        if scheduler.req_to_token_pool.available_size() < 1:
            return False
        count = -(-complete_positions(request) // self._pages.page_tokens)
        if tracked.kv_source is KvSource.IN_PLACE:
            taken = None if self.reservations is None else self.reservations.take(tracked.session, count)
            if taken is None:
                self._arena.count(Counter.RESERVATIONS_LOST)
                waiting.until_s = 0.0
                return False
        else:
            pages = self._pages.take(count)
            if pages is None:
                return False
            taken = Taken(pages, complete=False)
        waiting.pages, waiting.is_complete = taken.pages, taken.complete
        if scheduler.req_to_token_pool.alloc([request]) is None:
            raise RuntimeError("no row for a request, although one was free")
        self._write_row(request, taken.pages)
        tracked.slot.set_blocks(taken.pages)
        tracked.pages = list(taken.pages)
        if not taken.complete:
            waiting.until_s = time.monotonic() + self._load_timeout_s
            tracked.slot.report(LoadState.WAITING, 0, 0)
        return True

    def _write_row(self, request: Any, pages: list[int]) -> None:
        import torch

        table = self._scheduler.req_to_token_pool
        count, size = complete_positions(request), self._pages.page_tokens
        starts = torch.tensor(pages, dtype=torch.int64, device=table.device) * size
        slots = (starts[:, None] + torch.arange(size, device=table.device)).reshape(-1)[:count]
        table.write((request.req_pool_idx, slice(0, count)), slots.to(torch.int32))

    def _join(self, waiting: _Waiting) -> None:
        """Make a batch of one that needs no prefill, and merge it into the running one."""
        tracked, pages = waiting.tracked, waiting.pages or []
        request = tracked.request
        positions = complete_positions(request)
        batch = self._prebuilt(request, positions)
        tracked.slot.report(LoadState.DONE, positions, 1)
        tracked.phase, tracked.told = Phase.LOADED, True
        scheduler = self._scheduler
        self._pages.hand_over(pages)
        waiting.pages = None
        self._waiting.remove(waiting)
        if scheduler.running_batch.is_empty():
            scheduler.running_batch = batch
        else:
            scheduler.running_batch.merge_batch(batch)

    def _prebuilt(self, request: Any, positions: int) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        request.init_next_round_input()
        request.kv_allocated_len = request.kv_committed_len = positions
        request.set_extend_range(0, positions)
        # Its KV is that of the interrupted run, page by page, and stays its own.
        request.skip_radix_cache_insert = True
        batch = ScheduleBatch.init_new(
            [request],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_prebuilt()
        batch.process_prebuilt(scheduler.server_args, scheduler.future_map)
        return batch

    def _fall_back(self, waiting: _Waiting, *, answered: bool) -> None:
        """Without KV: the scheduler computes it."""
        self._let_go(waiting, answered=answered)
        request = waiting.tracked.request
        request.kv_allocated_len = request.kv_committed_len = 0
        request.skip_radix_cache_insert = False
        request.extend_range = None
        self._without_kv(waiting.tracked)

    def _let_go(self, waiting: _Waiting, *, answered: bool) -> None:
        tracked, pages = waiting.tracked, waiting.pages
        waiting.pages = None
        if self.reservations is not None:
            self.reservations.release(tracked.session)
        if pages is None:
            return
        self._scheduler.req_to_token_pool.free(tracked.request)
        tracked.pages = []
        if answered or tracked.slot.inbox()[0] is not LoadState.NONE:
            self._pages.give_back(pages)
        else:
            self._promised.append(_Promised(tracked.slot, pages, time.monotonic() + PROMISED_S_MAX))

    def _free_answered(self) -> None:
        """Give back the pages of loads that were answered after all."""
        if not self._promised:
            return
        now_s = time.monotonic()
        over = [p for p in self._promised if p.slot.inbox()[0] is not LoadState.NONE or now_s >= p.until_s]
        self._promised = [p for p in self._promised if p not in over]
        for promised in over:
            self._pages.give_back(promised.pages)
