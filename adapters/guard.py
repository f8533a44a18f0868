"""The rule of every hook: the engine never sees an exception of ours, and what goes wrong is counted.

Owns the count of hook errors (mirrored into the arena by whoever has one) and the wrapping of engine functions with
a check of their signature. A hook that cannot be installed leaves the engine as it was: "no snapshot", never "no
service".
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger("midstream")

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

LOGGED_MAX = 20
# Functions of the engine that could not be hooked in this process.
missing: list[str] = []
_on_error: list[Callable[[], None]] = []
_logged = 0


def speak_through(engine_log: str) -> None:
    """Let what the plugin says go where the engine's own log of this name goes."""
    log.parent = logging.getLogger(engine_log)


def count_errors_with(callback: Callable[[], None]) -> None:
    """Call `callback` at each hook error from now on."""
    _on_error.append(callback)


def report(where: str) -> None:
    """Log the exception being handled (the first few with their traceback) and count it."""
    global _logged
    _logged += 1
    if _logged <= LOGGED_MAX:
        log.exception("midstream: %s failed; serving goes on without it", where)
    for callback in _on_error:
        with contextlib.suppress(Exception):
            callback()


def guarded(default: D) -> Callable[[Callable[P, T]], Callable[P, T | D]]:
    """Make a hook that answers `default` where it would have raised. `default` must be immutable."""

    def decorate(hook: Callable[P, T]) -> Callable[P, T | D]:
        @functools.wraps(hook)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | D:
            try:
                return hook(*args, **kwargs)
            except Exception:
                report(hook.__qualname__)
                return default

        return wrapper

    return decorate


def patch(
    owner: Any, name: str, parameters: tuple[str, ...], make: Callable[[Any], Any], *, needed: bool = True
) -> bool:
    """Replace `owner.name` by `make(original)` if it takes at least `parameters` in this order; False if it does not.

    `owner` is a class or a module of the engine. Where a hook is not needed, sessions are exact without it.
    """
    original = getattr(owner, name, None)
    label = f"{getattr(owner, '__name__', owner)}.{name}"
    if original is None:
        if needed:
            missing.append(label)
        log.warning("midstream: this engine has no %s; what depends on it is off", label)
        return False
    try:
        found = tuple(inspect.signature(original).parameters)
    except (TypeError, ValueError):
        found = ()
    if found[: len(parameters)] != parameters:
        if needed:
            missing.append(label)
        log.warning("midstream: %s takes %s, expected %s; what depends on it is off", label, found, parameters)
        return False
    replacement = make(original)
    functools.update_wrapper(replacement, original)
    setattr(owner, name, replacement)
    return True
