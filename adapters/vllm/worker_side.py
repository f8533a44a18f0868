"""Worker side: announces this rank's pool, commits its steps, and notices when the mover has filled a load's blocks.

Copies nothing itself. A load that the mover does not answer in time is reported as failed, and vLLM computes those
positions again.
"""

import time
from typing import Any

from ...session.arena import ArenaReader, Slot, SlotState
from ...session.ids import SessionId
from ...session.records import LoadState
from ..guard import guarded, report
from ..plugin_settings import PluginSettings
from . import pool, ranks
from .group import Commits
from .identity import may_adopt
from .loads import Load

NO_HASH = "0" * 32


class WorkerSide:
    """Everything that midstream does in a worker."""

    def __init__(self, settings: PluginSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        # vLLM makes the worker's connector before it allocates the pool.
        adopting = guarded(default=False)(may_adopt)(vllm_config)
        v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))
        guarded(default=None)(pool.install)(adopting=adopting, v2=v2)
        guarded(default=None)(ranks.install)()
        self._commits = guarded(default=None)(Commits)(settings, vllm_config)
        self._settings = settings
        self._block_tokens = vllm_config.cache_config.block_size
        self._block_count = kv_cache_config.num_blocks if kv_cache_config is not None else 0
        self._arena: ArenaReader | None = None
        self._pending: dict[str, tuple[Load, float]] = {}
        self._failed_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Tell the holder where the blocks of this rank's pool lie."""
        commits = self._commits is not None and self._commits.are_made
        pool.announce(kv_caches, self._block_count, self._block_tokens, commits=commits)

    def step_done(self, step: int, *, failed: bool) -> None:
        """This rank has written the KV of a step, or has left its stream to do so; `failed`: it has not."""
        if self._commits is not None:
            self._commits.done(step, failed=failed)

    def begin(self, loads: list[Load]) -> None:
        """Loads that the scheduler began with this step."""
        deadline = time.monotonic() + self._settings.load_timeout_s
        for load in loads:
            self._pending[load.request_id] = (load, deadline)

    def finished_loads(self) -> set[str]:
        """Requests whose loads have come to their end, well or badly."""
        done = set()
        for request_id, (load, deadline) in self._pending.items():
            try:
                state, tokens = self._answer(load)
            except Exception:
                # Not known to be loaded is not loaded: it is computed instead, and the request does not wait for ever.
                report("answer of the mover")
                state, tokens = LoadState.FAILED, 0
            if state is LoadState.NONE and time.monotonic() < deadline:
                continue
            done.add(request_id)
            if state is not LoadState.DONE or tokens < load.tokens:
                self._failed_blocks.update(load.blocks)
        for request_id in done:
            del self._pending[request_id]
        return done

    def take_failed_blocks(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _answer(self, load: Load) -> tuple[LoadState, int]:
        if load.in_place:
            return LoadState.DONE, load.tokens
        if self._arena is None:
            if self._settings.arena is None:
                return LoadState.FAILED, 0
            self._arena = ArenaReader(self._settings.arena)
        slot = Slot(load.slot_index, 0, SessionId(load.session), load.generation, SlotState.LIVE, 0, NO_HASH)
        return self._arena.inbox(slot)
