"""How vLLM is started beside a sidecar. Runs in the sidecar; imports nothing of vLLM."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ...session.errors import EngineError
from ..contract import Beside, Capabilities, EngineAdapter, HttpCall, Launch, flag_value, set_flag

KV_TRANSFER_CONFIG = {
    "kv_connector": "MidstreamConnector",
    "kv_connector_module_path": "midstream.adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


class VllmAdapter(EngineAdapter):
    """vLLM's OpenAI server."""

    name = "vllm"
    capabilities = Capabilities(standby=True, in_place=True, disk=True, quiesce=True, hides_ids_as_null=True)
    # Served in vLLM's development mode, which quiescing needs; some of them run code that the caller names.
    private_paths = frozenset(
        {
            "/pause",
            "/resume",
            "/is_paused",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/collective_rpc",
            "/server_info",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/get_world_size",
            "/scale_elastic_ep",
            "/is_scaling_elastic_ep",
            "/abort_requests",
        }
    )

    def recognises(self, argv: Sequence[str]) -> bool:
        names = [Path(word).name for word in argv[:4]]
        if ("vllm", "serve") in pairwise(names):
            return True
        return "vllm.entrypoints.openai.api_server" in argv[:4]

    def start(self, argv: Sequence[str], port: int, beside: Beside, env: Mapping[str, str]) -> Launch:
        if flag_value(argv, "--kv-transfer-config") is not None:
            raise EngineError(
                "vllm: the command already has --kv-transfer-config; leave it out, midstream sets its own "
                "(two connectors in one engine are not supported)"
            )
        for flag in ("--data-parallel-size", "-dp"):
            if (flag_value(argv, flag) or "1") != "1":
                raise EngineError(
                    f"vllm: the command has {flag}, and sessions of several engines behind one port cannot be told "
                    "apart; leave it out and have midstream start so many workers (--workers)"
                )
        command = set_flag(set_flag(argv, "--port", str(port)), "--host", "127.0.0.1")
        return Launch(
            (*command, *_connector_flags()),
            {**beside.environment(env), "VLLM_SERVER_DEV_MODE": "1"},
        )

    def attach(self, worker: str, state_dir: Path) -> Launch:
        return Launch(_connector_flags(), {"MIDSTREAM_STATE_DIR": str(state_dir), "MIDSTREAM_WORKER": worker})

    def quiesce(self) -> HttpCall | None:
        return HttpCall("POST", "/pause?mode=keep")

    def unquiesce(self) -> HttpCall | None:
        return HttpCall("POST", "/resume")


def _connector_flags() -> tuple[str, ...]:
    return "--kv-transfer-config", json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":"))
