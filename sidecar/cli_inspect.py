"""The commands that ask a running sidecar: `status`, `sessions`.

They render what its HTTP API answers and judge nothing; fields that are not known here are shown as they come.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Optional

import typer

from ..session.errors import EngineError
from .cli_options import AsJson, ConfigFile, settings_from
from .config import Settings

_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}

Url = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation
    typer.Option("--url", help="Where the sidecar listens (default: from the settings)."),
]


def status(url: Url = None, as_json: AsJson = False, config: ConfigFile = None) -> int:
    """Show workers, holder and mover of the running sidecar."""
    answer = ask(url or sidecar_url(settings_from(config, None).settings), "/midstream/v1/status")
    if as_json:
        print(json.dumps(answer))
        return 0
    workers = [w for w in answer.get("workers", []) if isinstance(w, Mapping)]
    show_table("Workers", ("name", "url", "state", "epoch", "pid", "sessions"), workers)
    for part in ("holder", "mover"):
        show_facts(part.capitalize(), answer.get(part))
    others = {k: v for k, v in answer.items() if k not in ("workers", "holder", "mover")}
    show_facts("Sidecar", others)
    return 0


def sessions(url: Url = None, as_json: AsJson = False, config: ConfigFile = None) -> int:
    """Show sessions in flight and their interruptions."""
    answer = ask(url or sidecar_url(settings_from(config, None).settings), "/midstream/v1/sessions")
    if as_json:
        print(json.dumps(answer))
        return 0
    rows = [_session_row(s) for s in answer.get("sessions", []) if isinstance(s, Mapping)]
    show_table("Sessions", ("session", "worker", "generation", "state", "tokens", "interruptions"), rows)
    return 0


def sidecar_url(settings: Settings) -> str:
    """Where a sidecar with these settings can be asked from this machine."""
    host = _ANY_ADDRESS.get(settings.listen.host, settings.listen.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{settings.listen.port}"


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


def show_table(title: str, first: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table: the columns of `first`, then whatever else the rows have."""
    from rich.console import Console
    from rich.table import Table

    more = [key for row in rows for key in row if key not in first]
    columns = [*first, *dict.fromkeys(more)]
    table = Table(title=f"{title}: {len(rows)}" if rows else f"{title}: none", title_justify="left")
    for column in columns if rows else ():
        table.add_column(column)
    for row in rows:
        table.add_row(*(say(row.get(column)) for column in columns))
    Console().print(table)


def show_facts(title: str, facts: object) -> None:
    """Print an object as one line a field."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    console.print(f"[bold]{title}[/bold]")
    if not isinstance(facts, Mapping):
        console.print(f"  {escape(say(facts))}")
        return
    for key, value in facts.items():
        console.print(f"  {escape(str(key))}: {escape(say(value))}", highlight=False)


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


def _session_row(session: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(session)
    outcomes = row.pop("outcomes", None) or []
    row["interruptions"] = "; ".join(
        f"{o.get('reason')}: {o.get('outcome')} from {o.get('tier')}, cut {say(o.get('cut'))}, "
        f"lag {say(o.get('lag'))}, gap {say(o.get('gap_ms'))} ms"
        for o in outcomes
        if isinstance(o, Mapping)
    )
    return row
