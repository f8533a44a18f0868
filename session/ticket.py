"""How an engine that others start finds its place beside a sidecar: one file per worker, claimed by renaming it.

The sidecar writes `<state>/workers/<name>/ticket.json` for the next epoch; the plugin of the engine that starts claims
it and takes its names from there into its own environment, which its child processes inherit. Standard library only.
"""

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from .errors import ArenaError
from .ids import worker_name

TICKET = "ticket.json"
CLAIMED = "claimed.json"
FIELDS = (
    "MIDSTREAM_WORKER",
    "MIDSTREAM_EPOCH",
    "MIDSTREAM_HOLDER",
    "MIDSTREAM_ARENA",
    "MIDSTREAM_ADOPT",
    "MIDSTREAM_LOAD_TIMEOUT_S",
)


def worker_dir(state_dir: Path, worker: str) -> Path:
    """Where a worker's arenas and its ticket lie."""
    return state_dir / "workers" / worker_name(worker)


def write_ticket(folder: Path, environment: Mapping[str, str]) -> None:
    """Offer the next epoch; replaces an offer that nobody has taken."""
    text = json.dumps({k: environment[k] for k in FIELDS if k in environment})
    temporary = folder / f".{TICKET}.{os.getpid()}"
    temporary.write_text(text)
    temporary.chmod(0o600)
    temporary.replace(folder / TICKET)


def claim_ticket(folder: Path) -> dict[str, str]:
    """Take the offer, once; ArenaError when there is none: the sidecar does not run, or another engine has taken it."""
    claimed = folder / CLAIMED
    try:
        (folder / TICKET).rename(claimed)
        body = json.loads(claimed.read_text())
    except (OSError, ValueError) as error:
        raise ArenaError(
            f"no place is offered in {folder} ({error}); start `midstream serve` with a worker of this name first"
        ) from error
    if not isinstance(body, dict):
        raise ArenaError(f"the offer in {folder} is not an object; run the same midstream in the engine and beside it")
    return {k: str(body[k]) for k in FIELDS if k in body}


def claim_place(environ: MutableMapping[str, str]) -> None:
    """For an engine's first process: take the place that is offered to it, if it was told where. ArenaError if none is.

    Processes that it starts inherit what it was given, and claim nothing.
    """
    if environ.get("MIDSTREAM_STATE_DIR") and environ.get("MIDSTREAM_WORKER") and not environ.get("MIDSTREAM_HOLDER"):
        environ.update(claim_ticket(worker_dir(Path(environ["MIDSTREAM_STATE_DIR"]), environ["MIDSTREAM_WORKER"])))


def claimed_epoch(folder: Path) -> int | None:
    """The epoch that was claimed last, or None."""
    try:
        return int(json.loads((folder / CLAIMED).read_text())["MIDSTREAM_EPOCH"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
