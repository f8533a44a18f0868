"""Looks whether everything is there that midstream needs, and says how to mend what is not.

Owns what a check is and which are made. Each check looks at one thing, changes nothing that stays, waits only for a
bounded time, and never raises: a check that breaks is itself a finding. The checks are in `doctor_host.py` and
`doctor_engine.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from .config import Settings


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WARN = "warn"  # it works, but less well or not everything
    FAIL = "fail"  # it will not work


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: the fact, and the remedy where there is something to mend."""

    name: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def ok(name: str, fact: str) -> Check:
    """Nothing to mend."""
    return Check(name, Verdict.OK, fact)


def warn(name: str, fact: str, remedy: str) -> Check:
    """It works, but not as well as it could."""
    return Check(name, Verdict.WARN, fact, remedy)


def fail(name: str, fact: str, remedy: str) -> Check:
    """It will not work."""
    return Check(name, Verdict.FAIL, fact, remedy)


def examine(settings: Settings, engine_python: str | None = None) -> list[Check]:
    """All findings about this machine, these settings, and the engine's environment if it is named."""
    from . import doctor_engine, doctor_host

    found: list[Check] = []
    for check in doctor_host.CHECKS:
        found += _guarded(check.__name__, lambda check=check: [check(settings)])  # type: ignore[misc]
    found += _guarded("sidecar", lambda: doctor_engine.sidecar(settings))
    found += _guarded("workers", lambda: doctor_engine.workers(settings))
    if engine_python is not None:
        found += _guarded(
            "engine", lambda: doctor_engine.environment(engine_python, is_attached=bool(settings.workers))
        )
    found += _guarded("gpu", lambda: [doctor_engine.gpu()])
    if doctor_engine.has_gpu():
        from .cards import doctor as doctor_cards

        found += _guarded("cards", doctor_cards.cards)
    return found


def _guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except Exception as error:
        return [fail(name, f"the check itself broke ({type(error).__name__}: {error})", "please report this")]
