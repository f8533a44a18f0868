"""The rule of every hook: what fails in it stays in it."""

import os
import types
from pathlib import Path

import pytest

from midstream.adapters import guard
from midstream.adapters.vllm.plugin import register


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_on_error", [])
    monkeypatch.setattr(guard, "missing", [])


def test_a_hook_that_fails_answers_with_its_default_and_is_counted_once() -> None:
    counted: list[str] = []
    guard.count_errors_with(lambda: counted.append("one"))

    @guard.guarded(default=7)
    def hook() -> int:
        raise OSError("disk on fire")

    assert hook() == 7
    assert counted == ["one"]


def test_a_counter_that_fails_is_no_reason_to_stop() -> None:
    counted: list[str] = []

    def broken() -> None:
        raise ValueError("unmapped")

    guard.count_errors_with(broken)
    guard.count_errors_with(lambda: counted.append("one"))
    try:
        raise OSError
    except OSError:
        guard.report("a test")
    assert counted == ["one"]


def test_a_function_that_is_missing_or_other_than_expected_is_left_as_it_is() -> None:
    owner = types.SimpleNamespace(take=lambda request, prompt: (request, prompt), builtin=dict.fromkeys)
    original = owner.take
    assert not guard.patch(owner, "gone", ("self",), lambda f: None)
    assert not guard.patch(owner, "take", ("prompt",), lambda f: None)
    assert not guard.patch(owner, "builtin", ("first",), lambda f: None)
    assert owner.take is original
    assert guard.patch(owner, "take", ("request",), lambda f: lambda request, prompt: ("ours", f(request, prompt)))
    assert owner.take(1, 2) == ("ours", (1, 2))


def test_an_engine_that_was_offered_no_place_runs_as_if_there_were_no_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MIDSTREAM_WORKER", "a")
    monkeypatch.delenv("MIDSTREAM_HOLDER", raising=False)
    # Nothing of vLLM is imported here: it would not be found. A child process must not claim what this one could not.
    register()
    assert "MIDSTREAM_WORKER" not in os.environ


def test_a_hook_that_does_not_fit_is_told_of_unless_sessions_are_exact_without_it() -> None:
    class Engine:
        def step(self, other: int) -> int:
            return other

    assert not guard.patch(Engine, "step", ("self", "batch"), lambda original: original, needed=False)
    assert guard.missing == []
    assert not guard.patch(Engine, "step", ("self", "batch"), lambda original: original)
    assert not guard.patch(Engine, "gone", ("self",), lambda original: original)
    assert guard.missing == ["Engine.step", "Engine.gone"]
