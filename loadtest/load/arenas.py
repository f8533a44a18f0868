"""What workers are writing, read from their arenas: which sessions are live, and how far each journal is.

Owns the mappings, one for each epoch that it looks at. Reads only, and only arenas of sidecars that this test started.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.arena import ArenaReader
from ...session.errors import ArenaError
from ...session.ids import SessionId
from ...session.records import SlotState
from ...session.ticket import worker_dir


@dataclass(frozen=True, slots=True)
class Writing:
    """A live session on a worker, how many tokens its journal has, and how many of these it was taken up with."""

    session: SessionId
    outputs: int
    resumed: int

    @property
    def is_decoding(self) -> bool:
        """Whether this worker has written a token of its own: before that it prefills, or waits for KV."""
        return self.outputs > self.resumed


class Arenas:
    """The arenas of one sidecar's workers."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._open: dict[str, tuple[int, ArenaReader]] = {}

    def writing(self, worker: Mapping[str, Any]) -> list[Writing]:
        """The live sessions of a worker's present epoch; [] where it has no arena."""
        reader = self._reader(str(worker["name"]), int(worker["epoch"]))
        if reader is None:
            return []
        live = [slot for slot in reader.slots() if slot.state is SlotState.LIVE]
        return [Writing(slot.session, len(reader.journal(slot)), slot.resumed) for slot in live]

    def counters(self, worker: Mapping[str, Any]) -> dict[str, int]:
        """What its plugin counted; `arena_full` among it."""
        reader = self._reader(str(worker["name"]), int(worker["epoch"]))
        return {} if reader is None else reader.counters()

    def close(self) -> None:
        """Unmap all."""
        for _, reader in self._open.values():
            reader.close()
        self._open.clear()

    def _reader(self, name: str, epoch: int) -> ArenaReader | None:
        known = self._open.get(name)
        if known is not None and known[0] == epoch:
            return known[1]
        if known is not None:
            known[1].close()
            del self._open[name]
        with suppress(ArenaError):
            self._open[name] = (epoch, ArenaReader(worker_dir(self._state_dir, name) / f"{epoch}.arena"))
            return self._open[name][1]
        return None
