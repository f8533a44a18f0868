"""SGLang's plugin: installs the hooks of this process.

Runs in the engine's first process, which serves HTTP, and in each scheduler. Everything here is off unless the engine
was started beside a sidecar (settings.py), and each hook is installed by itself: one that does not fit this SGLang is
left out.
"""

import multiprocessing
import os

from ...session.ticket import claim_place
from ..vllm.guard import guarded, log
from ..vllm.settings import WORKER, plugin_settings
from .marking import draw_field
from .obstacles import TESTED_VERSIONS

_registered = False


@guarded(default=None)
def register() -> None:
    """Install the hooks of this process, once."""
    global _registered
    if _registered:
        return
    _claim()
    if plugin_settings() is None:
        return
    _registered = True
    from .settings_of_engine import engine_version

    if engine_version() not in TESTED_VERSIONS:
        log.warning("midstream: SGLang %s was not tested (%s were)", engine_version(), ", ".join(TESTED_VERSIONS))
    if multiprocessing.parent_process() is None:
        from . import front_end

        draw_field()
        guarded(default=None)(front_end.install)()
        return
    from . import pool, scheduler_hooks

    guarded(default=None)(pool.install)()
    guarded(default=None)(scheduler_hooks.install)()


@guarded(default=None)
def _claim() -> None:
    try:
        claim_place(os.environ)
    except Exception:
        # All processes of an engine have a place or none has: a child must not find the one that its parent did not.
        os.environ.pop(WORKER, None)
        raise
