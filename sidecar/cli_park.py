"""`midstream park` and `midstream unpark`: whole processes to memory of the host and back (docs/parking.md).

A name is a worker of the running sidecar, which is asked at its private socket; a number is a process, and needs no
sidecar. They render what came of it and judge nothing.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..session.errors import ConfigError
from .cli_inspect import show_table
from .cli_options import AsJson, ConfigFile, StateDir, settings_from

COLUMNS = ("name", "state", "pids", "gpus", "for_s", "text")
PIDS_MAX = 64

Driver = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation
    typer.Option("--driver", hidden=True, help="MODULE:FUNCTION that makes the driver, for tests."),
]
HostMemory = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--host-memory", metavar="BYTES", help="So much host memory may be taken, whatever the machine says."),
]
Probe = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--probe", metavar="COMMAND", help="A shell's command that ends with 0 when the process is well."),
]


def park(
    who: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[WORKER | PID...]", help="A worker by name, or processes that belong together."),
    ] = None,
    probe: Probe = None,
    host_memory: HostMemory = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    driver: Driver = None,
) -> int:
    """Move a worker, or any CUDA process, from its GPU to memory of the host; without a name, list what is there.

    It keeps its process and its graphs, and `midstream unpark` brings it back in seconds. Exit status 1 when it was
    refused or failed.
    """
    settings = settings_from(config, None, state_dir=state_dir).settings
    folder = Path(settings.state_dir)
    from .parking import by_pid

    if not who:
        rows = by_pid.listed(folder)
        if as_json:
            print(json.dumps({"parked": rows}))
        else:
            show_table("Parked", COLUMNS, rows)
        return 0
    pids = _pids(who)
    if pids is None:
        return _asked_of_sidecar(folder, who, "park", {}, as_json)
    from .parking.settings import limits_of

    options = _options(by_pid, folder, limits_of(settings), probe, host_memory, driver)
    return _shown(asyncio.run(by_pid.park(pids, options)), "parked", as_json)


def unpark(
    who: Annotated[str, typer.Argument(metavar="WORKER | PID", help="What `midstream park` lists.")],
    gpu: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--gpu", metavar="[OLD=]NEW", help="UUID of the GPU to come back on; may be repeated."),
    ] = None,
    probe: Probe = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    driver: Driver = None,
) -> int:
    """Bring a parked worker or process back, on the GPU where it was or on another of the kind.

    Exit status 1 when it was refused, and is parked as before, or was lost.
    """
    settings = settings_from(config, None, state_dir=state_dir).settings
    folder = Path(settings.state_dir)
    from .parking import by_pid

    name = by_pid.name_of([int(who)]) if who.isdigit() else who
    if not name.startswith(by_pid.PREFIX):
        return _asked_of_sidecar(folder, [who], "unpark", {"gpus": gpu or []}, as_json)
    from .parking.settings import limits_of

    options = _options(by_pid, folder, limits_of(settings), probe, None, driver)
    return _shown(asyncio.run(by_pid.unpark(name, gpu or [], options)), "running", as_json)


def _pids(words: list[str]) -> list[int] | None:
    """The pids; None where the words are no numbers. ConfigError for a mixture."""
    numbers = [word.isdigit() for word in words]
    if not any(numbers):
        if len(words) > 1:
            raise ConfigError("park one worker at a time; several pids are one group")
        return None
    if not all(numbers) or len(words) > PIDS_MAX or len(set(words)) != len(words):
        raise ConfigError(f"give one worker's name, or at most {PIDS_MAX} different pids, got {' '.join(words)}")
    return [int(word) for word in words]


def _options(by_pid: Any, folder: Path, limits: Any, probe: str | None, memory: int | None, driver: str | None) -> Any:
    more = {} if driver is None else {"driver": driver}
    return by_pid.Options(folder, limits, probe, free_bytes=memory, **more)


def _asked_of_sidecar(folder: Path, who: list[str], verb: str, body: dict[str, Any], as_json: bool) -> int:
    async def run() -> dict[str, Any]:
        from .control_client import ControlClient

        async with ControlClient(folder) as control:
            return await control.ask_worker(who[0], verb, body)

    answer = asyncio.run(run())
    return _say(str(answer["state"]), str(answer["text"]), answer["seconds"], bool(answer["ok"]), as_json)


def _shown(outcome: Any, wanted: str, as_json: bool) -> int:
    is_there = outcome.state.value == wanted
    return _say(outcome.state.value, outcome.text, dict(outcome.seconds), is_there, as_json)


def _say(state: str, text: str, seconds: dict[str, float], is_there: bool, as_json: bool) -> int:
    if as_json:
        rounded = {name: round(value, 4) for name, value in seconds.items()}
        print(json.dumps({"ok": is_there, "state": state, "text": text, "seconds": rounded}))
    else:
        took = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items() if value >= 0.005)
        print("; ".join(filter(None, (state, text, took))))
    return 0 if is_there else 1
