"""The commands that look at this installation: `doctor`, `config`, `version`."""

import json
import platform
from importlib import metadata
from typing import Annotated, Optional

import typer

from .cli_inspect import console, show_table
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
from .config import description
from .config import leaves as all_settings
from .config_load import flag, values


def doctor(
    engine_python: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation
        typer.Option("--engine-python", metavar="PYTHON", help="The interpreter that the engine runs on."),
    ] = None,
    worker: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--worker", metavar="[NAME=]URL", help="An engine to look at; may be repeated."),
    ] = None,
    host: Host = None,
    port: Port = None,
    store_dir: StoreDir = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> int:
    """Say what is missing here and how to mend it.

    Exit status 1 when something fails.
    """
    loaded = settings_from(
        config,
        assignments,
        state_dir=state_dir,
        host=host,
        port=port,
        store_dir=store_dir,
        more=[flag("workers", worker, "--worker")] if worker else [],
    )
    from .doctor import Verdict, examine

    checks = examine(loaded.settings, engine_python)
    failed = any(check.verdict is Verdict.FAIL for check in checks)
    if as_json:
        rows = [{"name": c.name, "verdict": c.verdict.value, "fact": c.fact, "remedy": c.remedy} for c in checks]
        print(json.dumps({"ok": not failed, "checks": rows}))
        return int(failed)
    from rich.markup import escape

    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    screen = console(soft_wrap=True)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        colour = colours[check.verdict]
        screen.print(f"[{colour}]{check.verdict.value:<4}[/{colour}] {escape(f'{check.name}: {check.fact}{remedy}')}")
    return int(failed)


def config(
    host: Host = None,
    port: Port = None,
    store_dir: StoreDir = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    as_json: AsJson = False,
) -> int:
    """Print the effective settings, and where each came from."""
    loaded = settings_from(
        config,
        assignments,
        state_dir=state_dir,
        host=host,
        port=port,
        store_dir=store_dir,
        log_level=log_level,
        log_format=log_format,
    )
    found = values(loaded.settings)
    if as_json:
        print(json.dumps({key: {"value": value, "from": loaded.places[key]} for key, value in found.items()}))
        return 0
    rows = [
        {
            "setting": k,
            "value": json.dumps(v),
            "from": loaded.places[k],
            "what it is for": description(all_settings()[k]),
        }
        for k, v in found.items()
    ]
    show_table("Settings", ("setting", "value", "from", "what it is for"), rows)
    return 0


def version(as_json: AsJson = False) -> int:
    """Print the version of midstream and of what it runs on."""
    if as_json:
        facts = {
            "midstream": metadata.version("midstream"),
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        print(json.dumps(facts))
        return 0
    print(version_text())
    return 0


def version_text() -> str:
    """The version in one line."""
    return f"midstream {metadata.version('midstream')} (Python {platform.python_version()})"
