"""The commands and the options that they share. What a command does is in `cli_run.py` and its neighbours.

Heavy imports are inside the commands, so that `--help` is quick.
"""

from typing import Annotated, Any

import typer

from ..session.errors import ConfigError
from . import (
    cli_check,
    cli_drain,
    cli_gateway,
    cli_inspect,
    cli_loadtest,
    cli_park,
    cli_run,
    cli_sessions,
    cli_snapshots,
    cli_verify,
)

_HELP = """Keeps LLM answers going, at the exact token, when the worker that was writing them dies.

\b
    midstream run -- vllm serve MODEL               start an engine, with the plugin, behind the sidecar
    midstream serve --worker http://127.0.0.1:8000  stand in front of engines that others started
    midstream doctor                                what is missing on this machine, and how to mend it
"""
_EPILOG = (
    "Exit status: 0 done; 1 done, and the answer is no (a check failed, a snapshot is damaged); "
    "2 a flag, a setting or the installation is wrong; 3 something cannot be reached or started."
)

app = typer.Typer(
    name="midstream",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# The base of everything that is wrong with a command line. typer brings a click of its own, which it does not export.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run_app() -> int:
    """Run the command line; errors of midstream come through to the caller. ConfigError for a wrong flag or command."""
    try:
        result: Any = app(standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "midstream"
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        raise ConfigError(f"{text.rstrip('.')}; see {path} --help") from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return int(result or 0)


def _print_version(asked: bool) -> None:
    if asked:
        print(cli_check.version_text())
        raise typer.Exit


@app.callback(invoke_without_command=True, help=_HELP, epilog=_EPILOG)
def midstream(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The root of all commands; alone it shows what there is."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("run", context_settings={"allow_interspersed_args": False})(cli_run.run)
app.command("serve")(cli_run.serve)
app.command("gateway")(cli_gateway.gateway)
app.command("drain")(cli_drain.drain)
app.command("demo")(cli_run.demo)
app.command("loadtest", context_settings={"allow_interspersed_args": False})(cli_loadtest.loadtest)
app.command("park")(cli_park.park)
app.command("unpark")(cli_park.unpark)
app.command("status")(cli_inspect.status)
app.command("doctor")(cli_check.doctor)
app.command("verify", context_settings={"allow_interspersed_args": False})(cli_verify.verify)
app.command("config")(cli_check.config)
app.command("version")(cli_check.version)
app.add_typer(cli_sessions.app, name="sessions")
app.add_typer(cli_snapshots.app, name="snapshots")
