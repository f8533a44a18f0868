"""The command `verify`: what cannot be meant is refused before anything starts."""

import signal
from collections.abc import Iterator

import pytest

from midstream.loadtest.verify.verification import Options
from midstream.sidecar import cli, environments, verify_bench
from midstream.sidecar.cli_app import app


class Started(Exception):
    """The verification would begin now."""


@pytest.fixture
def own_signals() -> Iterator[None]:
    """What the command does when it is told to end is not to outlive it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name what is to be verified"),
        (("--worker", "http://127.0.0.1:1"), "two or more"),
        (("--worker", "http://127.0.0.1:1", "--", "vllm"), "name what is to be verified"),
        (("--worker", "a=nonsense", "--worker", "b=http://127.0.0.1:1"), "--worker a=nonsense"),
        (("--engine", "sglang", "--", "vllm"), "name what is to be verified"),
        (("--engine", "steam"), "expected one of transformers, vllm, sglang"),
        (("--ways", "teleport", "--", "true"), "--ways teleport"),
        (("--ways", "", "--", "true"), "--ways"),
        (("--state-dir", "/tmp/x", "--", "true"), "--state-dir goes with --worker"),
        (("--prompts", "/no/such/file", "--", "true"), "/no/such/file"),
        (("--check", "/no/such/file", "--", "true"), "/no/such/file"),
        (("--record", "/no/such/folder/r.json", "--", "true"), "/no/such/folder"),
        (("--html", "/no/such/folder/r.html", "--", "true"), "/no/such/folder"),
        (("--set", "nothing", "--", "true"), "KEY=VALUE"),
        (("--set", "proxy.stall_flour_s=5", "--", "true"), "unknown setting"),
        (("--controls", "1", "--", "true"), "controls"),
        (("--kills", "2", "--", "true"), "kills"),
        (("--ways", "move", "--kills", "0.5", "--", "true"), "--ways has no kill"),
        (("--ways", "kill", "--kills", "0", "--", "true"), "nothing but kill"),
        (("--ways", "kill,kill", "--kills", "0.5", "--", "true"), "nothing but kill"),
        (("--", "no-such-engine-command"), "no such command"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["midstream", "verify", *words])
    assert cli.main() == cli.Exit.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert why in shown.err


def test_the_demo_s_engine_is_started_with_what_its_environment_needs(
    own_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(engines: verify_bench.Engines, *_: object, **__: object) -> None:
        raise Started(engines)

    monkeypatch.setattr(environments, "demo_engine", lambda engine, _: (["true", engine], {"A": "b"}))
    monkeypatch.setattr(verify_bench, "verify", stop)
    with pytest.raises(Started) as caught:
        app(["verify", "--engine", "sglang"], standalone_mode=False)
    engines = caught.value.args[0]
    assert (engines.command, dict(engines.environ)) == (("true", "sglang"), {"A": "b"})


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (("--ways", "move", "--kills", "0"), 0.0),
        (("--ways", "move"), 0.1),
        (("--ways", "kill", "--kills", "1"), 1.0),
        (("--ways", "kill"), 0.1),
        (("--ways", "kill,move", "--kills", "0.5"), 0.5),
        ((), 0.1),
    ],
)
def test_a_share_of_kills_that_the_ways_can_keep_is_taken(
    words: tuple[str, ...], share: float, own_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(_: object, options: Options, *__: object, **___: object) -> None:
        raise Started(options)

    monkeypatch.setattr(verify_bench, "verify", stop)
    with pytest.raises(Started) as caught:
        app(["verify", *words, "--", "true"], standalone_mode=False)
    assert caught.value.args[0].kill_share == share
