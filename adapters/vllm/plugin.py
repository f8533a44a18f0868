"""vLLM's `general_plugins` entry point: installs the hooks that a KV connector alone cannot provide.

Runs in every process of the engine, possibly more than once. Everything here is off unless the engine was started
beside a sidecar (plugin_settings.py), and each hook is installed by itself: one that does not fit this vLLM is left
out.
"""

from ..guard import guarded, log, speak_through
from ..plugin_settings import claim, plugin_settings
from .obstacles import TESTED_VERSIONS, plain_version

_registered = False


@guarded(default=None)
def register() -> None:
    """Install the hooks of this process, once."""
    global _registered
    if _registered:
        return
    speak_through("vllm")
    claim()
    if plugin_settings() is None:
        return
    _registered = True
    import vllm

    from . import core_hooks, late_hashes, lifelines, lora, replay, room, staging, thoughts

    version = plain_version(vllm)
    if version not in TESTED_VERSIONS:
        log.warning("midstream: vLLM %s was not tested (%s were)", version, ", ".join(TESTED_VERSIONS))
    for install in (
        replay.install,
        core_hooks.install,
        lora.install,
        thoughts.install,
        room.install,
        lifelines.install,
        late_hashes.install,
        staging.install,
    ):
        guarded(default=None)(install)()
