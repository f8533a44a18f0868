"""Scheduler side: the journal before release, the block tables with it, and who is tracked.

Owns the arena writer of this engine and what is known of each marked request. All methods are called by the scheduler's
one thread; scheduler_hooks.py guards them. Copies nothing and waits for nothing.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...session.arena import ArenaReader, Counter, SlotState
from ...session.arena_writer import ArenaWriter
from ...session.errors import ArenaError
from ...session.marker import FINISHES as ENDS
from ...session.marker import KvSource, Marker
from ...session.records import LoadState
from ..guard import count_errors_with, guarded, log, report
from ..plugin_settings import PluginSettings
from ..prompt import prompt_hash
from .follower import Follower, take_up
from .identity import facts_of
from .marking import checked_marker
from .pages import Pages
from .reservations import Reservations
from .restore import Restores
from .settings_of_engine import server_options
from .tracked import Phase, Tracked, complete_positions, has_more_than_tokens, is_reproducible

LOOK_EVERY_S = 1.0
# Longer than any session waits for its worker: pages of those who never come are the engine's capacity.
RESERVED_S_MAX = 1200.0


class SchedulerSide(Follower):
    """Everything that midstream does in the scheduler."""

    def __init__(self, settings: PluginSettings, scheduler: Any, enqueue: Callable[[Any], None]) -> None:
        """`enqueue` hands a request to SGLang as if there were no plugin."""
        if settings.arena is None:
            raise ValueError("no arena is named in the environment")
        super().__init__(scheduler)
        self._settings = settings
        self._enqueue = enqueue
        self._arena = ArenaWriter.open(settings.arena)
        count_errors_with(lambda: self._arena.count(Counter.HOOK_ERRORS))
        self._tracked: dict[str, Tracked] = {}
        self._looked_s = 0.0
        self._reserved_until_s = time.monotonic() + RESERVED_S_MAX
        self._deterministic = bool(server_options().enable_deterministic_inference)
        self.facts, adopted = facts_of(scheduler)
        self._pages = Pages(scheduler.token_to_kv_pool_allocator, scheduler.tree_cache)
        self._restores = Restores(
            scheduler,
            self._arena,
            self._pages,
            load_timeout_s=settings.load_timeout_s,
            without_kv=self._compute,
        )
        if adopted:
            self._restores.reservations = self._reserve()
        self._arena.publish(self.facts)

    def _reserve(self) -> Reservations:
        """Keep the pages of sessions that may come back in place."""
        tables, lost = {}, 0
        if self._settings.adopt is None:
            raise ValueError("a pool was adopted, and no arena says whose pages are in it")
        reader = ArenaReader(self._settings.adopt)
        try:
            for slot in sorted(reader.slots(), key=lambda s: s.generation):
                try:
                    if slot.state is SlotState.LIVE and reader.kv_len(slot):
                        tables[slot.session] = reader.table(slot).blocks
                except ArenaError as error:
                    log.warning("midstream: session %s has no pages to come back to (%s)", slot.session, error)
                    lost += 1
        finally:
            reader.close()
        reservations = Reservations(self._pages, tables)
        for _ in range(lost + reservations.lost):
            self._arena.count(Counter.RESERVATIONS_LOST)
        log.info("midstream: adopted pool, pages of %d sessions reserved", len(reservations))
        return reservations

    # ---- requests coming in

    def arrives(self, request: Any) -> bool:
        """Take a request in before SGLang queues it; True: it is ours for now, or over, and not to be queued."""
        if request.rid in self._tracked or request.finished() or request.to_finish is not None:
            return False
        marker = checked_marker(request)
        if marker is None:
            return False
        tracked = self._admit(request, marker)
        if take_up(self._scheduler, request, marker):
            return True
        if tracked is None or tracked.phase is not Phase.AWAITED:
            return False
        self._restores.begin(tracked)
        return True

    @guarded(default=None)
    def _admit(self, request: Any, marker: Marker) -> Tracked | None:
        """Give the session its place in the arena, if it can have one."""
        if has_more_than_tokens(request):
            return None
        prompt = list(request.origin_input_ids)
        resume = marker.resume
        outputs = resume.outputs if resume is not None else ()
        fingerprint = prompt_hash(prompt)
        slot = self._arena.admit(marker.session, marker.generation, len(prompt), fingerprint, outputs)
        if slot is None:
            return None
        phase = Phase.NEW
        if resume is not None and outputs:
            offered = bool(self.facts["pools"]) and resume.kv is not KvSource.NONE and not resume.finish
            same = fingerprint == resume.prompt_hash and is_reproducible(request, deterministic=self._deterministic)
            phase = Phase.AWAITED if offered and same else Phase.WITHOUT_KV
            if phase is Phase.WITHOUT_KV:
                slot.report(LoadState.FAILED, 0, 0)
        tracked = Tracked(request, marker, slot, phase, len(outputs))
        self._tracked[request.rid] = tracked
        return tracked

    def _compute(self, tracked: Tracked) -> None:
        """Its KV did not come: the scheduler computes prompt and outputs."""
        tracked.phase = Phase.WITHOUT_KV
        tracked.slot.report(LoadState.FAILED, 0, 0)
        tracked.slot.set_blocks(())
        self._enqueue(tracked.request)

    # ---- each step

    def before_step(self) -> None:
        """The scheduler is about to make its next batch."""
        self._restores.step()
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look_after_reservations(now_s)
            self._forget_the_lost()

    def before_output(self, requests: list[Any], skipped: Any) -> None:
        """SGLang is about to hand tokens on: journal them, and before them the table under which they were computed."""
        for request in requests:
            if request is not skipped and (tracked := self._tracked.get(request.rid)) is not None:
                self._or_forget(tracked, self._journal, tracked)

    def _journal(self, tracked: Tracked) -> None:
        request = tracked.request
        new = list(request.output_ids_through_stop[tracked.journaled :])
        if new:
            if not request.finished():
                self._write_table(tracked)
            self._tell_first_step(tracked)
            tracked.slot.append_tokens(new)
            tracked.journaled += len(new)
        if request.finished():
            self._finish(tracked, _reason(request))

    def _write_table(self, tracked: Tracked) -> None:
        """Compare the request's row with its table; pages are only added, but for a change of all of it."""
        request, size = tracked.request, self._pages.page_tokens
        count, known = complete_positions(request), tracked.pages
        row = self._scheduler.req_to_token_pool.req_to_token[request.req_pool_idx]
        if row.is_cuda and len(known) == -(-count // size):
            # To read it would have the scheduler wait for the GPU, and no page of a running request changes.
            return
        pages = (row[:count:size] // size).tolist()
        if pages == known:
            return
        if known and pages[: len(known)] == known:
            tracked.slot.append_blocks(pages[len(known) :])
        else:
            tracked.slot.set_blocks(pages)
        tracked.pages = pages

    def _tell_first_step(self, tracked: Tracked) -> None:
        """Say truthfully what this engine computed again."""
        if tracked.told or tracked.marker.resume is None or tracked.phase is not Phase.WITHOUT_KV:
            return
        tracked.told = True
        again = tracked.request.seqlen - 1 - tracked.request.cached_tokens
        tracked.slot.report(LoadState.FAILED, 0, max(again, 0))

    def _or_forget(self, tracked: Tracked, write: Callable[..., object], *args: Any) -> None:
        """Write something of one session. Where that fails it has no snapshot any more; no other notices."""
        try:
            write(*args)
        except Exception:
            report("record of a session")
            self._tracked.pop(tracked.request.rid, None)
            with suppress(Exception):
                tracked.slot.release()

    def _finish(self, tracked: Tracked, reason: str) -> None:
        if self._tracked.pop(tracked.request.rid, None) is None:
            return
        tracked.slot.finish(reason)
        if self._restores.reservations is not None:
            self._restores.reservations.release(tracked.session)

    def retracted(self, request: Any) -> None:
        """The request's pages were freed, and are somebody else's from the next batch on."""
        tracked = self._tracked.get(request.rid)
        if tracked is None:
            return
        tracked.pages = []
        self._or_forget(tracked, self._void, tracked)

    def _void(self, tracked: Tracked) -> None:
        if not tracked.slot.has_own_tokens:
            # What was loaded is gone with its pages.
            tracked.slot.report(LoadState.FAILED, 0, 0)
        tracked.slot.set_blocks(())

    # ---- requests that leave otherwise

    def aborted(self, message: Any) -> list[Any]:
        """End the requests that an abort names while they are on their way in; SGLang does not know them."""
        gone = []
        for tracked in list(self._tracked.values()):
            rid = tracked.request.rid
            if self._restores.has(tracked) and (message.abort_all or rid.startswith(message.rid)):
                self._restores.give_up(tracked)
                self._finish(tracked, "abort")
                gone.append(tracked.request)
        return gone

    def _forget_the_lost(self) -> None:
        """End in the arena what SGLang has dropped without a word: requests that waited too long, or for too much."""
        if not self._tracked:
            return
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch)
        known = {id(r) for batch in batches if batch is not None for r in batch.reqs}
        known |= {id(r) for r in scheduler.waiting_queue} | {id(r) for r in scheduler.grammar_manager.grammar_queue}
        known.add(id(scheduler.chunked_req))
        for tracked in list(self._tracked.values()):
            if id(tracked.request) not in known and not self._restores.has(tracked):
                self._or_forget(tracked, self._finish, tracked, "abort")

    def _look_after_reservations(self, now_s: float) -> None:
        reservations, adopt = self._restores.reservations, self._settings.adopt
        # The sidecar removes the old arena when none of its sessions can come back any more; if it died, nobody does.
        if reservations is not None and (now_s > self._reserved_until_s or adopt is None or not adopt.exists()):
            self._restores.reservations = None
            reservations.release_all()

    # ---- what SGLang asks about pages

    @property
    def is_waiting(self) -> bool:
        """Whether a request is on its way in: the scheduler is not idle then."""
        return len(self._restores) > 0

    @property
    def held_tokens(self) -> int:
        """Positions in pages that are in nobody's hands but ours."""
        return self._pages.held_tokens

    @property
    def held_rows(self) -> int:
        """Rows of requests that are in no batch."""
        return self._restores.row_count

    def pages_cleared(self) -> None:
        """SGLang has made a new list of free pages."""
        self._pages.keep_out()


def _reason(request: Any) -> str:
    """How a request ended, in the words of a record."""
    reason = str(request.finished_reason.to_json().get("type"))
    return reason if reason in ENDS or reason == "abort" else "error"
