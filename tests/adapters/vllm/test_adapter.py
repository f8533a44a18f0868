"""How vLLM is started: its own flags, midstream's added, and nothing that could be in the way."""

import json
from pathlib import Path

import pytest

from midstream.adapters.contract import Beside, flag_value
from midstream.adapters.vllm.adapter import VllmAdapter
from midstream.session.errors import EngineError

BESIDE = Beside("w0", 1, Path("/s/holder.sock"), Path("/s/1.arena"), None, 10.0, Path("/s/plugin"))


def test_the_command_keeps_its_words_and_gets_address_and_connector() -> None:
    argv = ["vllm", "serve", "m", "--host", "0.0.0.0", "--port=8000", "--max-model-len", "512"]
    launch = VllmAdapter().start(argv, 4321, BESIDE, {"PATH": "/bin"})
    assert launch.argv[:5] == ("vllm", "serve", "m", "--max-model-len", "512")
    # Clients speak with the sidecar: the engine itself listens to nobody else.
    assert (flag_value(launch.argv, "--host"), flag_value(launch.argv, "--port")) == ("127.0.0.1", "4321")
    config = json.loads(flag_value(launch.argv, "--kv-transfer-config") or "")
    assert config["kv_connector_module_path"] == "midstream.adapters.vllm.connector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert (launch.env["MIDSTREAM_ARENA"], launch.env["PATH"]) == ("/s/1.arena", "/bin")


@pytest.mark.parametrize("given", [["--kv-transfer-config", "{}"], ["--kv-transfer-config={}"]])
def test_another_connector_is_refused_with_its_flag_named(given: list[str]) -> None:
    with pytest.raises(EngineError, match="already has --kv-transfer-config; leave it out"):
        VllmAdapter().start(["vllm", "serve", "m", *given], 4321, BESIDE, {})


@pytest.mark.parametrize("given", [["--data-parallel-size", "2"], ["--data-parallel-size=2"], ["-dp", "4"]])
def test_several_engines_behind_one_port_are_refused_with_the_remedy(given: list[str]) -> None:
    with pytest.raises(EngineError, match="start so many workers"):
        VllmAdapter().start(["vllm", "serve", "m", *given], 4321, BESIDE, {})
    assert VllmAdapter().start(["vllm", "serve", "m", "--data-parallel-size", "1"], 4321, BESIDE, {}).argv


def test_what_development_mode_opens_is_closed_to_clients() -> None:
    launch = VllmAdapter().start(["vllm", "serve", "m"], 4321, BESIDE, {})
    assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert {"/collective_rpc", "/sleep", "/pause", "/resume", "/server_info"} <= VllmAdapter().private_paths
