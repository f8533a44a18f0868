"""Scheduler side: block tables before the step that uses them, the journal before release, and the way back in.

Owns the arena writer of this engine and what is known of each marked request. All methods are called by the engine
core's one thread; connector.py guards them. Copies nothing and waits for nothing.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ...session.arena import Counter
from ...session.arena_writer import ArenaWriter, SlotWriter
from ...session.commits import following
from ...session.ids import SessionId
from ...session.marker import KvSource, Marker
from ...session.records import LoadState
from ..guard import count_errors_with, guarded, report
from ..plugin_settings import PluginSettings
from ..prompt import prompt_hash
from .generators import draws_are_known
from .identity import facts_of
from .in_place import InPlace
from .late_hashes import LateOnes, catch_up
from .loads import Load, StepMeta
from .lora import session_hash
from .quarantine import Quarantine

FINISHES = ("stop", "length", "abort")


class Phase(Enum):
    """How far a request's way back in has come."""

    FRESH = auto()
    OFFERED = auto()
    LOADING = auto()
    LOADED = auto()
    WITHOUT_KV = auto()


@dataclass(slots=True)
class Tracked:
    """A marked request."""

    request: Any
    marker: Marker
    slot: SlotWriter
    phase: Phase
    first_step_seen: bool = False
    # The table that it was given for its KV, until its first step.
    given: list[int] | None = None

    @property
    def session(self) -> SessionId:
        return self.marker.session


class SchedulerSide:
    """Everything that midstream does in the engine core."""

    def __init__(self, settings: PluginSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        if settings.arena is None:
            raise ValueError("no arena is named in the environment")
        if getattr(vllm_config.parallel_config, "data_parallel_index", 0):
            raise ValueError("an arena has one writer, the first of the data-parallel engines")
        self._settings = settings
        self._block_tokens = vllm_config.cache_config.block_size
        self._arena = ArenaWriter.open(settings.arena)
        count_errors_with(lambda: self._arena.count(Counter.HOOK_ERRORS))
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, tuple[SlotWriter, tuple[int, ...]]] = {}
        self._quarantine: Quarantine | None = None
        self._ended_in_step: list[Tracked] | None = None
        self._in_place: InPlace | None = None
        self.facts, self._adopted = facts_of(settings, vllm_config, kv_cache_config)
        self._arena.publish(self.facts)
        self._has_ranks = len(self.facts["pools"]) > 1
        self._step = 0
        self._failed_loads: set[str] = set()
        self._late = LateOnes()
        self._draws_known = guarded(default=False)(draws_are_known)(vllm_config)

    def bind_block_pool(self, block_pool: Any) -> None:
        """Called once, before the first request: reserve the blocks of sessions that may come back in place."""
        self._quarantine = Quarantine(block_pool)
        if self._settings.adopt is not None and self._adopted:
            self._in_place = InPlace(
                block_pool, self._settings.adopt, lambda: self._arena.count(Counter.RESERVATIONS_LOST)
            )

    # ---- requests coming in

    def on_new_request(self, request: Any, marker: Marker) -> None:
        """Admit a marked request, whose outputs were re-entered, to the arena."""
        resume = marker.resume
        outputs = resume.outputs if resume is not None else ()
        prompt = request.prompt_token_ids
        if prompt is None or request.pooling_params is not None or _has_more_than_tokens(request):
            return
        fingerprint = session_hash(prompt_hash(prompt), request.lora_request)
        slot = self._arena.admit(marker.session, marker.generation, len(prompt), fingerprint, outputs)
        if slot is None:
            return
        phase = Phase.WITHOUT_KV
        if resume is not None and outputs and resume.kv is not KvSource.NONE:
            if fingerprint == resume.prompt_hash and (self._draws_known or not _is_seeded(request)):
                phase = Phase.FRESH
                # Exactly the interrupted run's KV is wanted, not somebody else's for the same tokens. Switched off
                # for the one look-up that precedes `matched`.
                request.skip_reading_prefix_cache = True
                self._late.add(request)
            else:
                slot.report(LoadState.FAILED, 0, 0)
        self._tracked[request.request_id] = Tracked(request, marker, slot, phase)

    def awaits_kv(self, request_id: str) -> bool:
        """Whether a request's KV is still to come."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.phase in (Phase.FRESH, Phase.OFFERED, Phase.LOADING)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many positions will be loaded: all but the last, once, and asynchronously; None: ask again later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.phase not in (Phase.FRESH, Phase.OFFERED):
            return None if self._gives_way(request) else 0, False
        request.skip_reading_prefix_cache = False
        tokens = request.num_tokens - 1
        if local_tokens or tokens < 1 or not tracked.slot.alive:
            self._without_kv(tracked)
            return 0, False
        if tracked.marker.resume is not None and tracked.marker.resume.kv is KvSource.IN_PLACE:
            count = -(-tokens // self._block_tokens)
            if self._in_place is None:
                self._arena.count(Counter.RESERVATIONS_LOST)
            if self._in_place is None or not self._in_place.offer(tracked.session, count):
                self._without_kv(tracked)
                return 0, False
        tracked.phase = Phase.OFFERED
        return tokens, True

    def _gives_way(self, request: Any) -> bool:
        """Whether a request is to be passed over for sessions that need nothing but the blocks reserved for them.

        vLLM's queue stops at the first request that there is no room for. The room is in the reserved blocks, and those
        they are reserved for may stand behind it: neither would ever move.
        """
        in_place = self._in_place
        if in_place is None or not in_place.is_short_of(-(-request.num_tokens // self._block_tokens)):
            return False
        return any(t.phase is Phase.FRESH and in_place.holds(t.session) for t in self._tracked.values())

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """The scheduler made room for the positions that `matched` promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.phase is not Phase.OFFERED or external_tokens <= 0:
            return
        in_place = self._in_place is not None and self._in_place.settle(tracked.session, block_ids)
        tracked.phase = Phase.LOADING
        tracked.slot.set_blocks(block_ids)
        tracked.given = block_ids
        if not in_place:
            self._loading[request.request_id] = (tracked.slot, tuple(block_ids))
            tracked.slot.report(LoadState.WAITING, 0, 0)
        self._loads.append(
            Load(
                request.request_id,
                tracked.session,
                tracked.marker.generation,
                tracked.slot.index,
                external_tokens,
                list(block_ids),
                in_place,
            )
        )

    def load_ended(self, request_ids: set[str], invalid_blocks: set[int]) -> None:
        """Workers report that loads came to their end: all of them have, or blocks of one have failed in some rank."""
        if invalid_blocks:
            self._failed_loads |= {
                r for r, (_, blocks) in self._loading.items() if not invalid_blocks.isdisjoint(blocks)
            }
        for request_id in request_ids:
            slot, blocks = self._loading.pop(request_id, (None, ()))
            failed = request_id in self._failed_loads
            self._failed_loads.discard(request_id)
            if slot is not None and slot.inbox()[0] is LoadState.NONE and self._quarantine is not None:
                # The mover said nothing: it may still write. Nobody else gets these blocks until it has.
                self._arena.count(Counter.LOADS_TIMED_OUT)
                self._quarantine.hold(slot, blocks)
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.phase is not Phase.LOADING:
                continue
            if failed:
                self._without_kv(tracked)
            else:
                tracked.phase = Phase.LOADED
                self._release(tracked)

    def _without_kv(self, tracked: Tracked) -> None:
        tracked.phase = Phase.WITHOUT_KV
        catch_up(tracked.request)
        tracked.slot.report(LoadState.FAILED, 0, 0)
        self._release(tracked)

    def _release(self, tracked: Tracked) -> None:
        if self._in_place is not None:
            self._in_place.release(tracked.session)

    # ---- each step

    def step_meta(self, scheduled: Any) -> StepMeta:
        """Write the block tables of what the step about to be launched touches, and give it its number."""
        self._step = following(self._step)
        for request_id in getattr(scheduled, "preempted_req_ids", None) or ():
            # This very step may write to its old blocks for somebody else: it has none until it is back.
            if (tracked := self._tracked.get(request_id)) is not None:
                self._or_forget(tracked, self._preempted, tracked)
        for new in scheduled.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                self._or_forget(tracked, self._first_table, tracked, new.block_ids[0])
                self._or_forget(tracked, self._first_step, tracked, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            blocks = cached.new_block_ids[index]
            if tracked is None or blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                # Preempted and back: its old blocks are somebody else's by now.
                self._or_forget(tracked, tracked.slot.set_blocks, blocks[0])
            elif blocks[0]:
                self._or_forget(tracked, tracked.slot.append_blocks, blocks[0])
        loads, self._loads = self._loads, []
        try:
            self._keep_reservations()
            if self._quarantine is not None:
                self._quarantine.free_answered()
        except Exception:
            report("reserved blocks")
        guarded(default=None)(self._late.step)(self.awaits_kv)
        return StepMeta(loads, self._step)

    def _or_forget(self, tracked: Tracked, write: Callable[..., object], *args: Any) -> None:
        """Write something of one session. Where that fails it has no snapshot any more; no other notices."""
        try:
            write(*args)
        except Exception:
            report("record of a session")
            self._tracked.pop(tracked.request.request_id, None)
            with suppress(Exception):
                tracked.slot.release()
            with suppress(Exception):
                catch_up(tracked.request)

    def _first_table(self, tracked: Tracked, blocks: list[int]) -> None:
        """With KV, it has the beginning already, under the same generation."""
        given, tracked.given = tracked.given, None
        if given and blocks[: len(given)] == given:
            tracked.slot.append_blocks(blocks[len(given) :])
        else:
            tracked.slot.set_blocks(blocks)

    def _preempted(self, tracked: Tracked) -> None:
        tracked.given = None
        catch_up(tracked.request)
        if not tracked.slot.has_own_tokens:
            # What was loaded is gone with its blocks.
            tracked.slot.report(LoadState.FAILED, 0, 0)
        tracked.slot.set_blocks(())

    def _first_step(self, tracked: Tracked, computed: int) -> None:
        """Say truthfully what was loaded and what this engine computes again."""
        if tracked.first_step_seen or tracked.marker.resume is None:
            return
        tracked.first_step_seen = True
        again = tracked.request.num_tokens - computed
        if tracked.phase is Phase.LOADED:
            tracked.slot.report(LoadState.DONE, computed, again)
        else:
            tracked.slot.report(LoadState.FAILED, 0, again)

    def _keep_reservations(self) -> None:
        for session in self._in_place.step() if self._in_place is not None else ():
            for tracked in self._tracked.values():
                if tracked.session == session and tracked.phase is Phase.OFFERED:
                    tracked.request.skip_reading_prefix_cache = True

    def step_begins(self) -> None:
        """The scheduler is about to take a step's results in; requests that end now end after their last tokens."""
        self._ended_in_step = []

    def step_ends(self, outputs: Any, step: int | None) -> None:
        """Journal what the step produced, before the core hands it on.

        Of which step that is, ranks must have in common: without its number it does not count until a later one does.
        """
        ended, self._ended_in_step = self._ended_in_step or [], None
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                tracked = self._tracked.get(output.request_id)
                if tracked is None:
                    continue
                if output.new_token_ids:
                    self._or_forget(tracked, tracked.slot.append_tokens, output.new_token_ids)
                    if self._has_ranks and step is not None:
                        self._or_forget(tracked, tracked.slot.mark, step)
                if output.finish_reason is not None:
                    self._or_forget(tracked, self._finish, tracked, str(output.finish_reason))
        for tracked in ended:
            self._or_forget(tracked, self._finish, tracked, "abort")

    def request_finished(self, request: Any) -> None:
        """A request ends; within a step its last tokens are still to be journaled."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if self._ended_in_step is not None:
            self._ended_in_step.append(tracked)
        else:
            self._finish(tracked, "abort")

    def _finish(self, tracked: Tracked, reason: str) -> None:
        if self._tracked.pop(tracked.request.request_id, None) is None:
            return
        tracked.slot.finish(reason if reason in FINISHES else "error")
        self._release(tracked)


def _has_more_than_tokens(request: Any) -> bool:
    """Whether its KV depends on what no prompt hash tells: images, embeddings, input that is still coming."""
    parts = ("mm_features", "prompt_embeds", "resumable")
    return any(getattr(request, name, None) not in (None, [], False) for name in parts)


def _is_seeded(request: Any) -> bool:
    """Whether it has a random state of its own; greedy requests draw nothing."""
    params = request.sampling_params
    return params.seed is not None and params.temperature > 0
