"""SGLang's plugin: installs the hooks of this process.

Runs in the engine's first process, which serves HTTP, and in each scheduler. Everything here is off unless the engine
was started beside a sidecar (plugin_settings.py), and each hook is installed by itself: one that does not fit this
SGLang is left out.
"""

import multiprocessing
import os

from ...session.errors import LifelineError
from ...session.lifeline import hold_lifeline, lifeline_of
from ..guard import guarded, log
from ..plugin_settings import claim, plugin_settings
from .marking import draw_field
from .obstacles import TESTED_VERSIONS

# The process that has its hooks: one that was forked from it begins anew.
_registered = 0


@guarded(default=None)
def register() -> None:
    """Install the hooks of this process, once."""
    global _registered
    if _registered == os.getpid():
        return
    claim()
    settings = plugin_settings()
    if settings is None:
        return
    _registered = os.getpid()
    if settings.arena is not None:
        name = multiprocessing.current_process().name
        hold_lifeline(lifeline_of(settings.arena), name, on_failure=_without_lifeline)
    from .settings_of_engine import engine_version

    if engine_version() not in TESTED_VERSIONS:
        log.warning("midstream: SGLang %s was not tested (%s were)", engine_version(), ", ".join(TESTED_VERSIONS))
    if multiprocessing.parent_process() is None:
        from . import draws, front_end

        draw_field()
        guarded(default=None)(front_end.install)()
        guarded(default=None)(draws.install_in_front_end)()
        return
    from . import draws, pool, scheduler_hooks

    guarded(default=None)(pool.install)()
    guarded(default=None)(draws.install_in_scheduler)()
    guarded(default=None)(scheduler_hooks.install)()


def _without_lifeline(error: LifelineError) -> None:
    log.warning("midstream: %s; its death is told later", error)
