"""The command `midstream`: looks whether its libraries are there, then hands over to `cli_app.py`.

Standard library only until then, because the package may be installed bare, beside an engine. Owns the exit codes.
"""

import sys
from enum import IntEnum
from importlib.util import find_spec

from ..session.errors import ConfigError, MidstreamError

# What the sidecar needs beyond the standard library (the `sidecar` extra).
LIBRARIES = (
    "aiohttp",
    "uvloop",
    "msgspec",
    "zstandard",
    "xxhash",
    "prometheus_client",
    "psutil",
    "typer",
    "rich",
    "yaml",
)


class Exit(IntEnum):
    """What the exit status of every command means."""

    OK = 0
    NEGATIVE = 1  # the command did its work, and the answer is no: a check failed, a snapshot is damaged
    USAGE = 2  # a flag, a setting or the installation is wrong
    UNAVAILABLE = 3  # the sidecar, an engine or a store cannot be reached or started
    INTERRUPTED = 130


def main() -> int:
    """Run the command line and return its exit status."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        print(
            f"midstream: {', '.join(missing)} not installed; the command needs the sidecar's libraries: "
            'in its checkout, pip install ".[sidecar]"',
            file=sys.stderr,
        )
        return Exit.USAGE
    from .cli_app import run_app

    try:
        return run_app()
    except ConfigError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return Exit.USAGE
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return Exit.UNAVAILABLE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `midstream sessions | head`
        sys.stderr.close()
        return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
