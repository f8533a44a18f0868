"""The command `verify`: what cannot be meant is refused before anything starts."""

import pytest

from midstream.sidecar import cli


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name what is to be verified"),
        (("--worker", "http://127.0.0.1:1"), "two or more"),
        (("--worker", "http://127.0.0.1:1", "--", "vllm"), "name what is to be verified"),
        (("--worker", "a=nonsense", "--worker", "b=http://127.0.0.1:1"), "--worker a=nonsense"),
        (("--ways", "teleport", "--", "true"), "--ways teleport"),
        (("--ways", "", "--", "true"), "--ways"),
        (("--state-dir", "/tmp/x", "--", "true"), "--state-dir goes with --worker"),
        (("--prompts", "/no/such/file", "--", "true"), "/no/such/file"),
        (("--check", "/no/such/file", "--", "true"), "/no/such/file"),
        (("--record", "/no/such/folder/r.json", "--", "true"), "/no/such/folder"),
        (("--html", "/no/such/folder/r.html", "--", "true"), "/no/such/folder"),
        (("--set", "nothing", "--", "true"), "KEY=VALUE"),
        (("--controls", "1", "--", "true"), "controls"),
        (("--kills", "2", "--", "true"), "kills"),
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
