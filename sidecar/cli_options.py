"""The options that several commands share, and the way from them to settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from .config_load import Given, Loaded, assignment, flag, load

ConfigFile = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads the annotation
    typer.Option("--config", metavar="FILE", help="Configuration file (YAML); also MIDSTREAM_CONFIG."),
]
StateDir = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--state-dir", metavar="DIR", help="Folder in memory for arenas and sockets."),
]
Host = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--host", help="Address to listen on (default 127.0.0.1)."),
]
Port = Annotated[Optional[int], typer.Option("--port", help="Port to listen on (default 8800).")]  # noqa: UP045
StoreDir = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--store-dir", metavar="DIR", help="Folder for snapshots on disk (default: none)."),
]
LogLevel = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--log-level", help="debug, info, warning or error."),
]
LogFormat = Annotated[Optional[str], typer.Option("--log-format", help="text or json.")]  # noqa: UP045
Assignments = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in --set proxy.keepalive_s=5; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def settings_from(
    config: Path | None,
    assignments: Sequence[str] | None,
    *,
    state_dir: str | None = None,
    host: str | None = None,
    port: int | None = None,
    store_dir: str | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
    more: Sequence[Given] = (),
) -> Loaded:
    """The effective settings of a command; a flag of its own beats `--set`."""
    flags = [assignment(text) for text in assignments or ()]
    given = (
        ("state_dir", state_dir, "--state-dir"),
        ("listen.host", host, "--host"),
        ("listen.port", port, "--port"),
        ("store.dir", store_dir, "--store-dir"),
        ("log.level", log_level, "--log-level"),
        ("log.format", log_format, "--log-format"),
    )
    flags += [flag(key, value, name) for key, value, name in given if value is not None]
    return load([*flags, *more], file=config)
