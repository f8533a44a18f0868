"""What the commands share that start a sidecar and engines of their own: `loadtest` and `verify`.

Owns the check of the engine's command, and the settings that are handed on to that sidecar. Everything is refused
here and now, not by a sidecar minutes later. Starts nothing.
"""

import shutil
from collections.abc import Sequence

from ..session.errors import ConfigError
from .config_load import assignment


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
