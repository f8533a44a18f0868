"""The command line of the load test: what cannot be done is refused before anything is started."""

import sys
from pathlib import Path
from typing import Any

import pytest

from midstream.loadtest.load import run
from midstream.loadtest.load.strategies import Strategy
from midstream.session.errors import ConfigError
from midstream.sidecar.cli_app import app

ENGINE = ("--", sys.executable, "-m", "engine")


class Started(Exception):
    """The test would begin now."""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Parses a command line as far as the beginning of the test, and returns its options."""

    async def stop(test: run.LoadTest) -> None:
        raise Started(test)

    monkeypatch.setattr(run.LoadTest, "run", stop)

    def parse(*words: str) -> run.Options:
        with pytest.raises(Started) as caught:
            app(["loadtest", "--out", str(tmp_path / "out"), *words], standalone_mode=False)
        test: run.LoadTest = caught.value.args[0]
        return test._options

    return parse


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "one of the two"),
        (["--url", "http://x", *ENGINE], "one of the two"),
        (["--url", "http://x", "--kills", "1"], "no faults are done"),
        (["--url", "http://x", "--strategy", "kv"], "--strategy would change nothing"),
        (["--url", "http://x", "--workers", "2"], "--workers would change nothing"),
        (["--url", "http://x", "--controls", "1"], "--controls would change nothing"),
        (["--url", "http://x", "--set", "proxy.stall_floor_s=5"], "--set would change nothing"),
        (["--", "no-such-engine"], "no such command"),
        (["--strategy", "kv,magic", *ENGINE], "kv, recompute, restart, engine"),
        (["--strategy", "", *ENGINE], "give some of"),
        (["--extra-body", "[1]", *ENGINE], "no JSON object"),
        (["--prompt-tokens", "many", *ENGINE], "--prompt-tokens: 'many'"),
        (["--rate", "0", *ENGINE], "--rate: 0 is out of range"),
        (["--rate", "nan", *ENGINE], "--rate: nan is out of range"),
        (["--set", "x", *ENGINE], "expected KEY=VALUE"),
        (["--set", "proxy.stall_flour_s=5", *ENGINE], "unknown setting"),
        (["--arrivals", "nowhere", *ENGINE], "nowhere: cannot be read"),
        (["--dataset", "nowhere", *ENGINE], "nowhere: cannot be read"),
        (["--faults", "nowhere", *ENGINE], "nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(words: list[str], why: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=why):
        app(["loadtest", "--out", str(out), *words], standalone_mode=False)
    assert not out.exists()


def test_kills_and_a_plan_are_not_mixed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: []")
    with pytest.raises(ConfigError, match="give one of them"):
        app(["loadtest", "--kills", "1", "--faults", str(plan), *ENGINE], standalone_mode=False)


def test_without_a_rate_the_loop_is_closed_and_with_one_it_is_open(options: Any) -> None:
    closed = options("--concurrency", "3", *ENGINE)
    assert (closed.is_open_loop, closed.concurrency, closed.requests) == (False, 3, 100)
    opened = options("--rate", "2.5", "--duration", "8", *ENGINE)
    assert (opened.is_open_loop, opened.concurrency, opened.requests, opened.ask_count) == (True, 1000, None, 20)


def test_what_is_not_said_has_its_default_and_beside_a_running_one_nothing_needs_to_be_said(options: Any) -> None:
    for words in (ENGINE, ("--url", "http://x")):
        told = options(*words)
        assert (told.strategies, told.workers, told.controls, told.settings) == ((Strategy.KV,), 2, 1, {})


def test_a_trace_says_how_many_requests_there_are(options: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("0\n1\n2\n")
    told = options("--arrivals", str(trace), *ENGINE)
    assert (told.is_open_loop, told.requests, len(told.trace)) == (True, 3, 3)


def test_the_engine_s_own_options_are_not_taken_for_ours(options: Any) -> None:
    told = options("--strategy", "engine,kv,kv", "--set", "proxy.stall_floor_s=5", *ENGINE, "--seed", "9", "--", "x")
    assert told.command == (sys.executable, "-m", "engine", "--seed", "9", "--", "x")
    assert told.seed == 1
    assert told.strategies == (Strategy.ENGINE, Strategy.KV)
    assert told.settings == {"proxy.stall_floor_s": "5"}
