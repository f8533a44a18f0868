"""A plugin of vLLM's and SGLang's, for tests alone: the processes of an engine are forked and not spawned.

vLLM forks or spawns as VLLM_WORKER_MULTIPROC_METHOD says, but for the CPU, where it always spawns, and SGLang always
spawns: then three processes import all of it one after the other, which is most of a start. Those that are started by
hand do spawn, and so do those of the end-to-end tests and one pair of SGLangs.
"""

import multiprocessing
import os
from pathlib import Path
from typing import Any

VARIABLE = "FORKING_ENGINES"
# The plugin's name in an engine: this file is found there by it.
_PLUGIN = "midstream_forking"


def plant(folder: Path) -> None:
    """Put the plugin into a folder of an engine's Python path; it does nothing unless VARIABLE is set."""
    information = folder / f"{_PLUGIN}-0.dist-info"
    information.mkdir(parents=True)
    (folder / f"{_PLUGIN}.py").symlink_to(Path(__file__).resolve())
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{_PLUGIN} = {_PLUGIN}:register\n"
        f"[sglang.srt.plugins]\n{_PLUGIN} = {_PLUGIN}:register_with_sglang\n"
    )


def register() -> None:
    """The entry point of vLLM: what the platform sets for good is set back."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if original.__module__ == __name__:
        return

    def check_and_update_config(cls: Any, config: Any) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def register_with_sglang() -> None:
    """The entry point of SGLang: its processes are forked, and each of them loads its plugins as a new one would."""
    if not os.environ.get(VARIABLE) or multiprocessing.parent_process() is not None:
        return
    from sglang.srt import plugins
    from sglang.srt.entrypoints import engine

    original = engine._set_envs_and_config

    def set_envs_and_config(options: Any) -> None:
        original(options)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_config
    os.register_at_fork(after_in_child=lambda: setattr(plugins, "_plugins_loaded", False))
