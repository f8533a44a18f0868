"""How SGLang is started: its own flags, midstream's added, and nothing that could be in the way."""

from pathlib import Path

import pytest

from midstream.adapters.contract import Beside, flag_value
from midstream.adapters.sglang.adapter import SglangAdapter
from midstream.session.errors import EngineError

BESIDE = Beside("w0", 1, Path("/s/holder.sock"), Path("/s/1.arena"), None, 10.0, Path("/s/plugin"))
COMMAND = ["python", "-m", "sglang.launch_server", "--model-path", "m"]


def test_the_command_keeps_its_words_and_gets_address_and_pages() -> None:
    launch = SglangAdapter().start([*COMMAND, "--host", "0.0.0.0", "--port=30000"], 4321, BESIDE, {"PATH": "/bin"})
    assert launch.argv[:5] == tuple(COMMAND)
    # Clients speak with the sidecar: the engine itself listens to nobody else.
    assert (flag_value(launch.argv, "--host"), flag_value(launch.argv, "--port")) == ("127.0.0.1", "4321")
    assert flag_value(launch.argv, "--page-size") == "64"
    assert (launch.env["MIDSTREAM_ARENA"], launch.env["PATH"]) == ("/s/1.arena", "/bin")


def test_what_the_command_says_itself_is_said_once() -> None:
    launch = SglangAdapter().start([*COMMAND, "--page-size", "128"], 4321, BESIDE, {})
    assert flag_value(launch.argv, "--page-size") == "128"
    assert launch.argv.count("--page-size") == 1


@pytest.mark.parametrize("given", [["--dp-size", "2"], ["--data-parallel-size=2"], ["--dp", "4"]])
def test_several_engines_behind_one_port_are_refused_with_the_remedy(given: list[str]) -> None:
    with pytest.raises(EngineError, match="start so many workers"):
        SglangAdapter().start([*COMMAND, *given], 4321, BESIDE, {})
    assert SglangAdapter().start([*COMMAND, "--dp-size", "1"], 4321, BESIDE, {}).argv


def test_health_costs_no_token_also_where_others_start_it() -> None:
    launch = SglangAdapter().attach("w0", Path("/s"))
    assert launch.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert launch.env["MIDSTREAM_STATE_DIR"] == "/s"
    assert flag_value(launch.argv, "--page-size") == "64"


def test_what_changes_weights_or_memory_is_closed_to_clients() -> None:
    assert {"/flush_cache", "/update_weights_from_disk", "/pause_generation"} <= SglangAdapter().private_paths


def test_a_high_port_has_a_port_for_grpc_too() -> None:
    launch = SglangAdapter().start(COMMAND, 60001, BESIDE, {})
    assert launch.env["SGLANG_GRPC_PORT"] == "50001"
    assert SglangAdapter().start(COMMAND, 60001, BESIDE, {"SGLANG_GRPC_PORT": "7"}).env["SGLANG_GRPC_PORT"] == "7"
    assert "SGLANG_GRPC_PORT" not in SglangAdapter().start(COMMAND, 4321, BESIDE, {}).env
