"""What the plugin is told through its environment. A plugin without a worker name does nothing at all."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..session.ticket import claim_place
from .guard import guarded

ARENA = "MIDSTREAM_ARENA"
ADOPT = "MIDSTREAM_ADOPT"
HOLDER = "MIDSTREAM_HOLDER"
WORKER = "MIDSTREAM_WORKER"
EPOCH = "MIDSTREAM_EPOCH"
LOAD_TIMEOUT = "MIDSTREAM_LOAD_TIMEOUT_S"


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Paths and names of this worker epoch; `adopt` is the arena of the epoch whose pool is to be taken over."""

    worker: str
    epoch: int
    holder: Path
    arena: Path | None
    adopt: Path | None
    load_timeout_s: float

    def pool_name(self, rank: int, epoch: int | None = None) -> str:
        """The holder's name for the pool of a rank."""
        return f"{self.worker}/{self.epoch if epoch is None else epoch}/{rank}"


def plugin_settings() -> PluginSettings | None:
    """The settings, or None when this engine was not started beside a sidecar."""
    env = os.environ
    if not env.get(WORKER) or not env.get(HOLDER):
        return None
    return PluginSettings(
        env[WORKER],
        int(env.get(EPOCH, "1")),
        Path(env[HOLDER]),
        Path(env[ARENA]) if env.get(ARENA) else None,
        Path(env[ADOPT]) if env.get(ADOPT) else None,
        float(env.get(LOAD_TIMEOUT, "10")),
    )


@guarded(default=None)
def claim() -> None:
    """In the first process of an engine that others start: take the place that is offered to it, if one is."""
    try:
        claim_place(os.environ)
    except Exception:
        # All processes of an engine have a place or none has: a child must not find the one that its parent did not.
        os.environ.pop(WORKER, None)
        raise
