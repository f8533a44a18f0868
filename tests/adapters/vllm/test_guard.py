"""The rule of every hook: no exception of ours reaches the engine, and each is counted."""

import logging
from typing import Any

import pytest

from midstream.adapters.vllm import guard
from midstream.adapters.vllm.guard import count_errors_with, guarded, patch, report


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(guard, "_on_error", [])
    monkeypatch.setattr(guard, "_logged", 0)
    errors: list[int] = []
    count_errors_with(lambda: errors.append(1))
    return errors


@guarded(default=(0, False))
def hook(fail: bool) -> tuple[int, bool]:
    """A hook."""
    if fail:
        raise KeyError("ours")
    return 5, True


def test_a_hook_that_fails_answers_its_default_and_is_counted(
    counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert hook(False) == (5, True)
    assert counted == []
    assert hook(True) == (0, False)
    assert counted == [1]
    assert "midstream: hook failed; serving goes on without it" in caplog.text
    assert hook.__doc__ == "A hook."


def test_the_engines_own_signals_to_stop_are_not_swallowed() -> None:
    @guarded(default=None)
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_a_flood_of_errors_is_counted_but_logged_a_few_times_only(
    counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3 * guard.LOGGED_MAX):
        hook(True)
    assert len(counted) == 3 * guard.LOGGED_MAX
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == guard.LOGGED_MAX


def test_an_error_in_the_counting_of_errors_does_not_reach_the_engine_either(counted: list[int]) -> None:
    def broken() -> None:
        raise ValueError("the arena is unmapped")

    guard._on_error.insert(0, broken)
    assert hook(True) == (0, False)
    assert counted == [1]


def test_what_is_reported_elsewhere_is_counted_too(counted: list[int]) -> None:
    try:
        raise OSError("ours")
    except OSError:
        report("start of the worker side")
    assert counted == [1]


class Engine:
    """Stands for a class of vLLM."""

    def step(self, scheduler_output: str, extra: int = 0) -> str:
        """The original."""
        return f"{scheduler_output}{extra}"


def doubled(original: Any) -> Any:
    def step(self: Engine, scheduler_output: str, *args: Any, **kwargs: Any) -> str:
        return str(original(self, scheduler_output, *args, **kwargs)) * 2

    return step


def test_a_function_with_the_expected_signature_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", Engine.step)
    assert patch(Engine, "step", ("self", "scheduler_output"), doubled)
    assert Engine().step("a", extra=1) == "a1a1"
    assert Engine.step.__doc__ == "The original."


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("stop", ("self",)), ("step", ("self", "output")), ("step", ("self", "scheduler_output", "extra", "more"))],
)
def test_any_other_is_left_as_it_was_and_said(
    name: str, parameters: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    before = Engine.step
    assert not patch(Engine, name, parameters, doubled)
    assert Engine.step is before
    assert "what depends on it is off" in caplog.text
    assert f"Engine.{name}" in caplog.text


def test_a_function_without_a_signature_is_left_as_it_was() -> None:
    class Module:
        step = object()

    before = Module.step
    assert not patch(Module, "step", ("self",), doubled)
    assert Module.step is before
