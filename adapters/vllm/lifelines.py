"""A lifeline for each process of the engine, by which the sidecar learns of its death at once (`session/lifeline.py`).

Owns which processes hold one: whoever has a connector, that is the core and the workers, and the front end when its
engine is up. Not every process that loads the plugin does: vLLM starts some to look at a model, and those are meant to
end. Without one deaths are told all the same, later.
"""

import multiprocessing
from typing import Any

from ...session.errors import LifelineError
from ...session.lifeline import hold_lifeline, lifeline_of
from ..guard import guarded, log, patch
from ..plugin_settings import PluginSettings, plugin_settings


def install() -> None:
    """Hook the front end."""
    from vllm.v1.engine.async_llm import AsyncLLM

    patch(AsyncLLM, "__init__", ("self", "vllm_config", "executor_class", "log_stats"), _with_front_end, needed=False)


@guarded(default=None)
def hold(settings: PluginSettings | None, name: str | None = None) -> None:
    """Have this process hold a lifeline, under the name that vLLM gave to the process unless one is given here."""
    if settings is not None and settings.arena is not None:
        path = lifeline_of(settings.arena)
        hold_lifeline(path, name or multiprocessing.current_process().name, on_failure=_without)


def _without(error: LifelineError) -> None:
    log.warning("midstream: %s", error)


def _with_front_end(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Only then are its cores started: a process that is going to fork is not given a thread by us.
        original(self, *args, **kwargs)
        _front_end()

    return __init__


@guarded(default=None)
def _front_end() -> None:
    hold(plugin_settings(), "front end")
