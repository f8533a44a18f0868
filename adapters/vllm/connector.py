"""The KV connector that vLLM loads: hands each call to the side it is for, guarded.

`--kv-transfer-config '{"kv_connector":"MidstreamConnector","kv_connector_module_path":
"midstream.adapters.vllm.connector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'`
"""

import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ..guard import guarded, log, report
from ..plugin_settings import plugin_settings
from .late_hashes import catch_up
from .lifelines import hold
from .loads import StepMeta
from .marking import re_enter_outputs
from .scheduler_side import SchedulerSide
from .worker_side import WorkerSide

NOTHING: frozenset[Any] = frozenset()


class MidstreamConnector(KVConnectorBase_V1, SupportsHMA):
    """Thin: what is done is in scheduler_side.py and worker_side.py."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._model_config: Any = None
        settings = plugin_settings()
        if settings is None:
            log.warning("midstream: this engine was not started beside a sidecar; the connector does nothing")
            return
        self._model_config = vllm_config.model_config
        hold(settings)
        try:
            if role is KVConnectorRole.SCHEDULER:
                self.scheduler_side = SchedulerSide(settings, vllm_config, kv_cache_config)
            else:
                self.worker_side = WorkerSide(settings, vllm_config, kv_cache_config)
        except Exception:
            report(f"start of the {role.name.lower()} side")

    @property
    def requires_kv_delivery(self) -> bool:
        """Preempting a request loses nothing: this connector hands no KV off."""
        return False

    # ---- scheduler side

    @guarded(default=None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called by vLLM 0.25, and by the base class of 0.32 when it is bound to the cache manager."""
        if self.scheduler_side is not None:
            self.scheduler_side.bind_block_pool(gpu_block_pool)

    @guarded(default=None)
    def on_new_request(self, request: Any) -> None:
        if self._model_config is None:
            return
        side = self.scheduler_side
        try:
            marker = re_enter_outputs(request, self._model_config)
            if marker is not None and side is not None:
                side.on_new_request(request, marker)
        finally:
            if side is None or not side.awaits_kv(request.request_id):
                catch_up(request)

    @guarded(default=(0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        return self.scheduler_side.matched(request, num_computed_tokens)

    @guarded(default=(0,))
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: what is loaded (or already there, in place) must not be zeroed."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @guarded(default=None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._step_meta(scheduler_output) or StepMeta()

    @guarded(default=None)
    def _step_meta(self, scheduler_output: Any) -> StepMeta | None:
        return None if self.scheduler_side is None else self.scheduler_side.step_meta(scheduler_output)

    @guarded(default=None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.load_ended(
                connector_output.finished_recving or set(), connector_output.invalid_block_ids or set()
            )

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._request_finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._request_finished(request)
        return False, None

    @guarded(default=None)
    def _request_finished(self, request: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.request_finished(request)

    # ---- worker side

    @guarded(default=None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.worker_side is not None:
            self.worker_side.register_kv_caches(kv_caches)

    @guarded(default=None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run outside the engine; this only notes which ones to wait for."""
        if self.worker_side is not None and self.has_connector_metadata():
            self.worker_side.begin(self._get_connector_metadata().loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Asked once in each step, after the forward pass if it has one; `wait_for_save` is not, before 0.32."""
        self._step_done()
        return None, set(self._finished_loads()) or None

    @guarded(default=NOTHING)
    def _finished_loads(self) -> Any:
        return NOTHING if self.worker_side is None else self.worker_side.finished_loads()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._failed_blocks())

    @guarded(default=NOTHING)
    def _failed_blocks(self) -> Any:
        return NOTHING if self.worker_side is None else self.worker_side.take_failed_blocks()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing loads layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved from within a forward pass."""

    def wait_for_save(self) -> None:
        """Nothing is saved from within a forward pass."""

    @guarded(default=None)
    def _step_done(self) -> None:
        if self.worker_side is not None and self.has_connector_metadata():
            # vLLM asks also where the forward pass raised.
            failed = sys.exc_info()[0] is not None
            self.worker_side.step_done(self._get_connector_metadata().step, failed=failed)
