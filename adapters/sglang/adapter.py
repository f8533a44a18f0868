"""How SGLang is started beside a sidecar. Runs in the sidecar; imports nothing of SGLang."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ...session.errors import EngineError
from ..contract import Beside, Capabilities, EngineAdapter, Launch, flag_value, set_flag

PAGE_SIZE = "64"
SERVER_MODULE = "sglang.launch_server"
# Health by itself would generate a token each time, which takes a second.
_GRPC_PORT, _GRPC_OFFSET, _PORT_MAX = "SGLANG_GRPC_PORT", 10000, 65535
_ENVIRON = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
# Flags that ask for several engines behind one port.
_SEVERAL = ("--dp-size", "--data-parallel-size", "--dp")


class SglangAdapter(EngineAdapter):
    """SGLang's HTTP server."""

    name = "sglang"
    capabilities = Capabilities(standby=True, in_place=True, disk=True, quiesce=False, hides_ids_as_null=False)
    # They change weights, memory and sessions under running requests, or end them.
    private_paths = frozenset(
        {
            "/abort_request",
            "/add_external_corpus",
            "/clear_hicache_storage_backend",
            "/close_session",
            "/configure_logging",
            "/continue_generation",
            "/destroy_weights_update_group",
            "/dump_expert_distribution_record",
            "/dumper/",
            "/flush_cache",
            "/freeze_gc",
            "/get_remote_instance_transfer_engine_info",
            "/get_server_info",
            "/get_weights_by_name",
            "/hicache/",
            "/init_weights_send_group_for_remote_instance",
            "/init_weights_update_group",
            "/load_lora_adapter",
            "/load_lora_adapter_from_tensors",
            "/open_session",
            "/pause_generation",
            "/release_memory_occupation",
            "/remote_instance_transfer_engine_info",
            "/remove_external_corpus",
            "/resume_memory_occupation",
            "/send_weights_to_remote_instance",
            "/server_info",
            "/set_internal_state",
            "/set_trace_level",
            "/slow_down",
            "/start_expert_distribution_record",
            "/start_profile",
            "/stop_expert_distribution_record",
            "/stop_profile",
            "/unload_lora_adapter",
            "/update_weight_version",
            "/update_weights_from_disk",
            "/update_weights_from_distributed",
            "/update_weights_from_ipc",
            "/update_weights_from_tensor",
            "/weights_checker",
        }
    )

    def recognises(self, argv: Sequence[str]) -> bool:
        names = [Path(word).name for word in argv[:4]]
        return ("sglang", "serve") in pairwise(names) or SERVER_MODULE in argv[:4]

    def start(self, argv: Sequence[str], port: int, beside: Beside, env: Mapping[str, str]) -> Launch:
        for flag in _SEVERAL:
            if (flag_value(argv, flag) or "1") != "1":
                raise EngineError(
                    f"sglang: the command has {flag}, and sessions of several engines behind one port cannot be told "
                    "apart; leave it out and have midstream start so many workers (--workers)"
                )
        command = set_flag(set_flag(argv, "--port", str(port)), "--host", "127.0.0.1")
        return Launch(
            (*command, *_missing_flags(argv)), {**beside.environment(env), **_ENVIRON, **_grpc_port(port, env)}
        )

    def attach(self, worker: str, state_dir: Path) -> Launch:
        env = {"MIDSTREAM_STATE_DIR": str(state_dir), "MIDSTREAM_WORKER": worker, **_ENVIRON}
        return Launch(_missing_flags(()), env)


def _grpc_port(port: int, env: Mapping[str, str]) -> dict[str, str]:
    """SGLang adds 10000 to its port for gRPC, also where nobody uses it, and ends where there is no such port."""
    beyond = port + _GRPC_OFFSET > _PORT_MAX and _GRPC_PORT not in env
    return {_GRPC_PORT: str(port - _GRPC_OFFSET)} if beyond else {}


def _missing_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """What a command must say so that its sessions can be kept, unless it says otherwise."""
    return () if flag_value(argv, "--page-size") is not None else ("--page-size", PAGE_SIZE)
