"""`midstream status`, and what other commands need to ask a running sidecar and to show its answers.

They render what its HTTP API answers and judge nothing; fields that are not known here are shown as they come.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..session.errors import EngineError
from .cli_options import AsJson, ConfigFile, StateDir, settings_from
from .config import Settings
from .state_dir import listening_url, reachable_url

if TYPE_CHECKING:
    from rich.console import Console

_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
# Columns enough for every line that we write.
_WIDE = 100_000
_WORKER_COLUMNS = ("name", "url", "state", "epoch", "pid", "sessions", "restarts")

Url = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation
    typer.Option("--url", help="Where the sidecar listens (default: what it said in its state folder)."),
]


def status(
    url: Url = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    show_all: Annotated[bool, typer.Option("--all", help="Name the fields that are nothing or zero, too.")] = False,
) -> int:
    """Show workers, holder and mover of the running sidecar."""
    answer = ask(url or sidecar_url(settings_from(config, None, state_dir=state_dir).settings), "/midstream/v1/status")
    if as_json:
        print(json.dumps(answer))
        return 0
    workers = [w for w in answer.get("workers", []) if isinstance(w, Mapping)]
    show_table("Workers", _WORKER_COLUMNS, workers)
    for worker in workers:
        rest = {k: v for k, v in worker.items() if k not in _WORKER_COLUMNS}
        show_facts(f"Worker {worker.get('name')}", rest, name_empty=show_all)
    for part in ("holder", "mover"):
        show_facts(part.capitalize(), answer.get(part), name_empty=show_all)
    others = {k: v for k, v in answer.items() if k not in ("workers", "holder", "mover")}
    show_facts("Sidecar", others, name_empty=show_all)
    return 0


def sidecar_url(settings: Settings) -> str:
    """Where the sidecar of these settings can be asked from this machine: where it said, else where it is to listen."""
    told = listening_url(Path(settings.state_dir))
    return told or reachable_url(settings.listen.host, settings.listen.port)


def ask(url: str, path: str) -> dict[str, Any]:
    """The JSON object that the sidecar answers. EngineError when there is none."""
    place = url.rstrip("/") + path
    try:
        # Never by way of a proxy from the environment: this is a question to a neighbour.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(place, timeout=_TIMEOUT_S) as response:
            body = json.loads(response.read(_ANSWER_BYTES_MAX))
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(
            f"no sidecar answers at {place} ({reason}); is it running? Name it with --url http://HOST:PORT"
        ) from error
    if not isinstance(body, dict):
        raise EngineError(f"{place} does not answer as a sidecar would; name the sidecar with --url")
    return body


def console(*, soft_wrap: bool = False) -> "Console":
    """Standard output; where it is no terminal, lines are as long as what is in them: nobody can widen a file."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, soft_wrap=soft_wrap, width=wide)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table of those columns that any row has."""
    from rich.markup import escape
    from rich.table import Table

    screen = console()
    screen.print(f"[bold]{escape(title)}[/bold]: {len(rows) or 'none'}")
    if not rows:
        return
    present = [column for column in columns if any(column in row for row in rows)]
    # A narrow terminal breaks lines rather than words: an id that is cut off cannot be copied.
    table = Table(*(escape(column) for column in present), box=None, pad_edge=True)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(escape(say(row.get(column))) for column in present))
    screen.print(table)


def show_facts(title: str, facts: object, *, name_empty: bool = True) -> None:
    """Print an object as one line a field; what is nothing or zero comes last, together, or not at all."""
    from rich.markup import escape

    screen = console(soft_wrap=True)
    screen.print(f"[bold]{escape(title)}[/bold]")
    if not isinstance(facts, Mapping):
        screen.print(f"  {escape(say(facts))}")
        return
    empty = [str(key) for key, value in facts.items() if not value and not isinstance(value, bool)]
    for key, value in facts.items():
        if str(key) not in empty:
            screen.print(f"  {escape(str(key))}: {escape(say(value))}")
    if empty and name_empty:
        screen.print(f"  none: {escape(', '.join(empty))}")


def say(value: object) -> str:
    """A value in a table's cell."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return ", ".join(f"{k}={say(v)}" for k, v in value.items())
        case list() | tuple():
            return ", ".join(say(v) for v in value)
        case float():
            return f"{value:.4g}"
    return str(value)
