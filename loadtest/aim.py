"""A SIGKILL at an exact token: watches the journal in a worker's arena and kills when it has grown to a length.

The journal is written before a token can leave the engine, so a kill that waits for it comes closer than one that waits
for a client. Owns the watching thread; every wait in it is bounded.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..session.arena import ArenaReader
from ..session.errors import EngineError
from ..session.ids import SessionId
from ..session.records import Slot, SlotState
from ..session.ticket import worker_dir
from .harness import Victim, kill_worker

LOOK_EVERY_S = 0.0001
AIM_S = 300.0


@dataclass(frozen=True, slots=True)
class Target:
    """A worker that may get the session."""

    name: str
    pid: int
    arena: Path
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Shot:
    """What was killed; `outputs` is the journal's length when it was."""

    worker: str
    session: SessionId
    killed: tuple[str, ...]
    outputs: int


def target(worker: Mapping[str, Any], state_dir: Path) -> Target:
    """A worker as a target, from what the sidecar tells of it."""
    arena = worker_dir(state_dir, worker["name"]) / f"{worker['epoch']}.arena"
    return Target(worker["name"], worker["pid"], arena, int(worker["epoch"]))


def kill_at(
    targets: Sequence[Target],
    known: Collection[str],
    *,
    prompt_len: int,
    outputs: int,
    victim: Victim,
    may_shoot: Callable[[SessionId], bool] = lambda session: True,
) -> Shot:
    """Kill the worker of the new session with such a prompt once it has journaled `outputs` tokens.

    `known` are the sessions that were there before; `may_shoot` can hold the kill back. Blocks; meant for a thread. If
    the session ends first, the worker is killed all the same: too late, which is for the caller to see. EngineError
    when no such session appears.
    """
    deadline_s = time.monotonic() + AIM_S
    with ExitStack() as stack:
        readers = [(t, stack.enter_context(closing(ArenaReader(t.arena)))) for t in targets]
        target, reader, slot = _find(readers, known, prompt_len, deadline_s)
        count = 0
        while time.monotonic() < deadline_s:
            now = reader.refresh(slot)
            count = max(count, len(reader.journal(slot)))
            if now is None or now.state is not SlotState.LIVE or (count >= outputs and may_shoot(slot.session)):
                return Shot(target.name, slot.session, tuple(kill_worker(target.pid, victim)), count)
            time.sleep(LOOK_EVERY_S)
    raise EngineError(f"session {slot.session} had {count} of {outputs} tokens after {AIM_S:g} s; is its engine stuck?")


def _find(
    readers: Sequence[tuple[Target, ArenaReader]], known: Collection[str], prompt_len: int, deadline_s: float
) -> tuple[Target, ArenaReader, Slot]:
    while time.monotonic() < deadline_s:
        for target, reader in readers:
            for slot in reader.slots():
                if slot.session not in known and slot.prompt_len == prompt_len:
                    return target, reader, slot
        time.sleep(LOOK_EVERY_S)
    raise EngineError(f"no session with a prompt of {prompt_len} tokens appeared within {AIM_S:g} s")


def snapshot_exists(store: Path, session: SessionId) -> bool:
    """Whether the disk store holds a snapshot of a session (docs/formats.md)."""
    with suppress(OSError):
        return any(path.name != "finished" for path in (store / "sessions" / session).iterdir())
    return False
