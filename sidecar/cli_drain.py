"""`midstream drain`: empties a running sidecar, or one of its workers, and shows how far that is.

It asks by the sidecar's private socket and judges nothing.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..session.errors import ConfigError, EngineError
from .cli_options import AsJson, ConfigFile, StateDir, settings_from

_LOOK_EVERY_S = 0.5


def drain(
    deadline: Annotated[
        Optional[float],  # noqa: UP045 - typer reads the annotation
        typer.Option("--deadline", metavar="S", help="Seconds until it ends anyway (default: as at SIGTERM)."),
    ] = None,
    worker: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--worker", metavar="NAME", help="One worker alone; its sessions move to the others."),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Serve again.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show how far it is, until it is over.")] = True,
    as_json: AsJson = False,
    config: ConfigFile = None,
    state_dir: StateDir = None,
) -> int:
    """Take no new sessions, let the others end or go on elsewhere, then end.

    Exit status 1: it was over with sessions left, or was cancelled by somebody else.
    """
    if cancel and deadline is not None:
        raise ConfigError("--deadline: a drain that is cancelled has none; leave one of both out")
    folder = Path(settings_from(config, None, state_dir=state_dir).settings.state_dir)
    return asyncio.run(_run(folder, deadline, worker, cancel=cancel, wait=wait, as_json=as_json))


async def _run(
    folder: Path, deadline_s: float | None, worker: str | None, *, cancel: bool, wait: bool, as_json: bool
) -> int:
    from .control_client import ControlClient

    async with ControlClient(folder) as control:
        if cancel:
            _show(_part(await control.cancel_drain(worker=worker), worker), as_json=as_json)
            return 0
        told = _part(await control.drain(deadline_s=deadline_s, worker=worker), worker)
        _show(told, as_json=as_json)
        while wait and told["phase"] == "draining":
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                now = _part(await control.drains(), worker)
            except EngineError:
                # It has ended, as it was told to.
                now = {**told, "phase": "over", "sessions_left": 0 if _ended_early(told) else told["sessions_left"]}
            if (now["phase"], now["sessions_left"]) != (told["phase"], told["sessions_left"]):
                _show(now, as_json=as_json)
            told = now
        return 1 if wait and (told["phase"] == "serving" or told["sessions_left"]) else 0


def _ended_early(told: Mapping[str, Any]) -> bool:
    """Whether its deadline was not reached when it was last seen, nor can have been since."""
    return float(told.get("deadline_in_s", 0.0)) > 2 * _LOOK_EVERY_S


def _part(told: Mapping[str, Any], worker: str | None) -> dict[str, Any]:
    if worker is None:
        return {name: value for name, value in told.items() if name != "workers"}
    found = told["workers"].get(worker)
    return dict(found) if found is not None else {"phase": "serving", "reasons": [], "sessions_left": 0}


def _show(told: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(told)), flush=True)
        return
    left, limit = told["sessions_left"], told.get("deadline_in_s")
    within = f", {limit:.0f} s left" if limit is not None and told["phase"] == "draining" else ""
    print(f"{told['phase']}: {left} session{'' if left == 1 else 's'}{within}", flush=True)
