"""`midstream status`, and what other commands need to ask a running sidecar and to show its answers.

They render what its HTTP API answers and judge nothing; fields that are not known here are shown as they come.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..session.errors import EngineError
from .cli_options import AsJson, ConfigFile, StateDir, settings_from
from .config import Settings
from .state_dir import listening_url, reachable_url

_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
_WORKER_COLUMNS = ("name", "url", "state", "epoch", "pid", "sessions", "restarts")

Url = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation
    typer.Option("--url", help="Where the sidecar listens (default: what it said in its state folder)."),
]


def status(url: Url = None, as_json: AsJson = False, config: ConfigFile = None, state_dir: StateDir = None) -> int:
    """Show workers, holder and mover of the running sidecar."""
    answer = ask(url or sidecar_url(settings_from(config, None, state_dir=state_dir).settings), "/midstream/v1/status")
    if as_json:
        print(json.dumps(answer))
        return 0
    workers = [w for w in answer.get("workers", []) if isinstance(w, Mapping)]
    show_table("Workers", _WORKER_COLUMNS, workers)
    for worker in workers:
        show_facts(f"Worker {worker.get('name')}", {k: v for k, v in worker.items() if k not in _WORKER_COLUMNS})
    for part in ("holder", "mover"):
        show_facts(part.capitalize(), answer.get(part))
    show_facts("Sidecar", {k: v for k, v in answer.items() if k not in ("workers", "holder", "mover")})
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


def show_table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table of those columns that any row has."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(title)}[/bold]: {len(rows) or 'none'}")
    if not rows:
        return
    present = [column for column in columns if any(column in row for row in rows)]
    # A narrow terminal breaks lines rather than words: an id that is cut off cannot be copied.
    table = Table(*(escape(column) for column in present), box=None, pad_edge=True)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(escape(say(row.get(column))) for column in present))
    console.print(table)


def show_facts(title: str, facts: object) -> None:
    """Print an object as one line a field; what is nothing or zero comes last, together."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(title)}[/bold]")
    if not isinstance(facts, Mapping):
        console.print(f"  {escape(say(facts))}")
        return
    empty = [str(key) for key, value in facts.items() if not value and not isinstance(value, bool)]
    for key, value in facts.items():
        if str(key) not in empty:
            console.print(f"  {escape(str(key))}: {escape(say(value))}")
    if empty:
        console.print(f"  none: {escape(', '.join(empty))}")


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
