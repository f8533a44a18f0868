"""What the commands share that start a sidecar and engines of their own: `demo`, `loadtest` and `verify`.

Owns the check of the engine's command, and the settings that are handed on to that sidecar. Everything is refused
here and now, not by a sidecar minutes later. Starts nothing, but builds the environment of a demo's engine.
"""

import shutil
from collections.abc import Sequence

from ..session.errors import ConfigError
from .config_load import assignment

# As environments.py knows them, which is loaded only where one is built.
DEMO_ENGINES = ("transformers", "vllm", "sglang")


def require_demo_engine(engine: str) -> None:
    """ConfigError where the demo has no such engine."""
    if engine not in DEMO_ENGINES:
        raise ConfigError(f'--engine: expected one of {", ".join(DEMO_ENGINES)}, got "{engine}"')


def demo_command(engine: str) -> tuple[list[str], dict[str, str]]:
    """The command of one worker as the demo has it, and what its environment needs beside ours; builds it first."""
    require_demo_engine(engine)
    from . import environments

    with environments.Progress() as progress:
        return environments.demo_engine(engine, progress)


def require_command(command: Sequence[str]) -> None:
    """ConfigError where there is no such program."""
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]}: no such command on the path; activate the engine's environment or give its full path"
        )


def assigned(assignments: Sequence[str] | None) -> dict[str, str]:
    """The settings of `--set KEY=VALUE`, the last of a key. ConfigError where there is no such setting."""
    given = [assignment(text) for text in assignments or ()]
    return {one.key: str(one.value) for one in given}
