"""The command `midstream gateway`."""

from typing import Annotated, Optional

import typer

from .cli_options import Assignments, ConfigFile, Host, LogFormat, LogLevel, Port, settings_from
from .config_load import flag


def gateway(
    node: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation
        typer.Option("--node", metavar="[NAME=]URL", help="A sidecar of the fleet; may be repeated."),
    ] = None,
    secret_file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--secret-file", metavar="FILE", help="The secret that all of the fleet share."),
    ] = None,
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> int:
    """Stand in front of many sidecars: clients' streams outlive the nodes that write them.

    midstream gateway --secret-file secret --node a=http://10.0.0.1:8800 --node b=http://10.0.0.2:8800
    """
    more = [flag("gateway.nodes", ",".join(node), "--node")] if node else []
    if secret_file is not None:
        more.append(flag("fleet.secret_file", secret_file, "--secret-file"))
    loaded = settings_from(
        config, assignments, host=host, port=port, log_level=log_level, log_format=log_format, more=more
    )
    from . import logs
    from .gateway import daemon

    logs.configure(loaded.settings.log)
    return daemon.run(loaded.settings)
