"""The commands that start something: `run`, `serve`, `demo`."""

import json
import shutil
from typing import Annotated, Optional

import typer

from ..adapters.registry import adapter_for
from ..session.errors import ConfigError, EngineError
from .cli_engines import demo_command, require_demo_engine
from .cli_options import (
    AsJson,
    Assignments,
    ConfigFile,
    Host,
    LogFormat,
    LogLevel,
    Port,
    StateDir,
    StoreDir,
    settings_from,
)
from .config import require_workers
from .config_load import flag


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="How the engine is started.")],
    workers: Annotated[
        Optional[int],  # noqa: UP045 - typer reads the annotation
        typer.Option("--workers", help="Engines to start; each gets a port of its own (default 1)."),
    ] = None,
    host: Host = None,
    port: Port = None,
    store_dir: StoreDir = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> int:
    """Start an engine behind the sidecar, and again when it crashes.

    Everything after -- is the engine's own command line; midstream adds the plugin and a port of its own:
    midstream run --workers 2 -- vllm serve MODEL --max-model-len 4096
    """
    more = [] if workers is None else [flag("engine.worker_count", workers, "--workers")]
    loaded = settings_from(
        config,
        assignments,
        state_dir=state_dir,
        host=host,
        port=port,
        store_dir=store_dir,
        log_level=log_level,
        log_format=log_format,
        more=more,
    )
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]}: no such command on the path; activate the engine's environment or give its full path"
        )
    if loaded.settings.workers:
        raise ConfigError(
            f"workers ({loaded.places['workers']}) names engines that others started; "
            "leave it out, or use `midstream serve`"
        )
    try:
        adapter_for(command)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    from . import daemon, logs

    logs.configure(loaded.settings.log)
    return daemon.run(loaded.settings, command)


def serve(
    worker: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation
        typer.Option("--worker", metavar="[NAME=]URL", help="An engine that runs already; may be repeated."),
    ] = None,
    host: Host = None,
    port: Port = None,
    store_dir: StoreDir = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> int:
    """Stand in front of engines that others started.

    midstream serve --worker a=http://127.0.0.1:8101 --worker b=http://127.0.0.1:8102
    """
    more = [flag("workers", worker, "--worker")] if worker else []
    loaded = settings_from(
        config,
        assignments,
        state_dir=state_dir,
        host=host,
        port=port,
        store_dir=store_dir,
        log_level=log_level,
        log_format=log_format,
        more=more,
    )
    require_workers(loaded.settings)
    from . import daemon, logs

    logs.configure(loaded.settings.log)
    return daemon.run(loaded.settings, None)


def demo(
    engine: Annotated[
        str, typer.Option("--engine", help="transformers (embedded), vllm or sglang (two real workers).")
    ] = "transformers",
    as_json: AsJson = False,
    command: Annotated[
        bool, typer.Option("--command", help="Only print how one worker of it is started, without a port.")
    ] = False,
) -> int:
    """Stream an answer, kill its worker, watch it go on.

    Sets up what it needs in a cache folder (MIDSTREAM_CACHE, default ~/.cache/midstream).
    """
    require_demo_engine(engine)
    if command:
        from . import environments

        argv, added = demo_command(engine)
        print(json.dumps({"argv": argv, "env": added}) if as_json else environments.as_shell(argv, added))
        return 0
    from . import demo as demonstration

    return demonstration.run(engine=engine, as_json=as_json)
