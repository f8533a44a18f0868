"""`midstream sessions`: lists sessions, and does with one what its operator asks: move, snapshot, fork.

Listing goes by the sidecar's HTTP API, the rest by its private socket. It judges nothing.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..session.errors import ConfigError
from ..session.ids import SessionId, session_id
from .cli_inspect import Url, ask, say, show_facts, show_table, sidecar_url
from .cli_options import AsJson, ConfigFile, StateDir, settings_from

COLUMNS = ("session", "parent", "worker", "generation", "state", "obstacle", "age_s", "path")

app = typer.Typer(help="Show sessions and their interruptions, or act on one.", rich_markup_mode=None)

Session = Annotated[str, typer.Argument(help="The session's id, 32 hex digits.")]


@app.callback(invoke_without_command=True)
def sessions(
    context: typer.Context,
    url: Url = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    state_dir: StateDir = None,
) -> int:
    """Show sessions in flight and their interruptions, or act on one."""
    if context.invoked_subcommand is not None:
        return 0
    settings = settings_from(config, None, state_dir=state_dir).settings
    answer = ask(url or sidecar_url(settings), "/midstream/v1/sessions")
    if as_json:
        print(json.dumps(answer))
        return 0
    found = [s for s in answer.get("sessions", []) if isinstance(s, Mapping)]
    show_table("Sessions", COLUMNS, found)
    interruptions = [line for session in found for line in _interruptions(session)]
    if interruptions:
        print("Interruptions")
    for line in interruptions:
        print(f"  {line}")
    return 0


@app.command("move")
def move(
    session: Session,
    tier: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation
        typer.Option(
            "--tier", help="Where its KV comes from: held (default), memory, disk, or journal (computed again)."
        ),
    ] = None,
    at: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--at", help="Wait until it has written this many tokens."),
    ] = None,
    config: ConfigFile = None,
    state_dir: StateDir = None,
) -> int:
    """Have a session go on on another worker; its client sees a short pause."""
    folder, wanted = _folder(config, state_dir), _id(session)

    async def run() -> int:
        from .control_client import ControlClient

        async with ControlClient(folder) as control:
            return await control.move(wanted, tier=tier, at=at)

    print(f"moved after {asyncio.run(run())} tokens")
    return 0


@app.command("snapshot")
def snapshot(session: Session, as_json: AsJson = False, config: ConfigFile = None, state_dir: StateDir = None) -> int:
    """Store a session as it is now."""
    folder, wanted = _folder(config, state_dir), _id(session)

    async def run() -> dict[str, Any]:
        from .control_client import ControlClient

        async with ControlClient(folder) as control:
            return await control.snapshot(wanted)

    stored = asyncio.run(run())
    if as_json:
        print(json.dumps(stored))
    else:
        show_facts(f"Snapshot of {session}", stored)
    return 0


@app.command("fork")
def fork(
    session: Session,
    at: Annotated[int, typer.Option("--at", help="How many tokens the branch has in common with the session.")],
    changes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="FIELD=JSON", help="Another value for a field, as in --set temperature=1.2."),
    ] = None,
    header: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--header", metavar="NAME:VALUE", help="For the engine, as one that asks for a key wants."),
    ] = None,
    config: ConfigFile = None,
    state_dir: StateDir = None,
) -> int:
    """Branch a session off at an earlier token, without computing its prefix again; prints the branch's stream.

    The stream begins with what branch and session have in common. The session may be running, or among the last that
    ended, if snapshots are stored.
    """
    folder, wanted = _folder(config, state_dir), _id(session)
    fields = dict(_field(text) for text in changes or ())
    headers = dict(_header(text) for text in header or ())

    async def run() -> None:
        from .control_client import ControlClient

        async with ControlClient(folder) as control:
            async for piece in control.fork(wanted, at, fields, headers):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()

    asyncio.run(run())
    return 0


def _folder(config: Path | None, state_dir: str | None) -> Path:
    return Path(settings_from(config, None, state_dir=state_dir).settings.state_dir)


def _id(text: str) -> SessionId:
    try:
        return session_id(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {text!r}: expected FIELD=JSON, as in --set temperature=1.2")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ConfigError(f"--set {text!r}: the value is not JSON; a text needs its quotes, as in '\"END\"'") from None


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        raise ConfigError(f"--header {text!r}: expected NAME:VALUE")
    return name.strip(), value.strip()


def _interruptions(session: Mapping[str, Any]) -> list[str]:
    found = [o for o in session.get("outcomes") or [] if isinstance(o, Mapping)]
    return [
        f"{session.get('session')}  {o.get('reason')}: {o.get('outcome')} from {o.get('tier')}, "
        f"cut {say(o.get('cut'))}, lag {say(o.get('lag'))}, gap {_whole(o.get('gap_ms'))} ms"
        for o in found
    ]


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else say(value)
