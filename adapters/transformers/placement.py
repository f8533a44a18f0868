"""Where the pool lies: what a sidecar says to its engine, and memory that outlives this process if somebody keeps it.

Owns the environment variables and the choice between the old pool, a new one, and one of the process's own. Nothing
here ever writes to a pool's contents.
"""

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.errors import ArenaError, EngineError, MidstreamError, PoolError
from ...session.held import HolderClient, create_host_pool, map_pool
from ...session.layout import PoolLayout, PoolMeta
from ...session.ticket import claim_place
from .adopt import OldPool, find_old_pool
from .job import LOAD_TIMEOUT_S
from .kv import KvPool
from .model import Model

HOLDER_WAIT_S = 3.0

log = logging.getLogger("midstream.transformers")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a sidecar tells the engine through its environment; all of it may be absent."""

    arena: Path | None
    holder: Path | None
    adopt: Path | None
    worker: str
    epoch: int
    load_timeout_s: float

    @classmethod
    def of_environment(cls) -> "Surroundings":
        """Read MIDSTREAM_* variables. EngineError names one that is wrong."""
        env = os.environ
        try:
            claim_place(env)
        except ArenaError as error:
            log.warning("event=no_place error=%s", error)
        try:
            epoch = int(env.get("MIDSTREAM_EPOCH") or 1)
            load_timeout_s = float(env.get("MIDSTREAM_LOAD_TIMEOUT_S") or LOAD_TIMEOUT_S)
        except ValueError as error:
            raise EngineError(f"MIDSTREAM_EPOCH and MIDSTREAM_LOAD_TIMEOUT_S must be numbers: {error}") from error
        return cls(
            _path(env.get("MIDSTREAM_ARENA")),
            _path(env.get("MIDSTREAM_HOLDER")),
            _path(env.get("MIDSTREAM_ADOPT")),
            env.get("MIDSTREAM_WORKER") or "transformers",
            epoch,
            load_timeout_s,
        )

    @property
    def pool_name(self) -> str:
        """The name of this epoch's pool with the holder."""
        return f"{self.worker}/{self.epoch}/0"


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """The pool, and what the arena's facts say of it."""

    pool: KvPool
    names: tuple[str, ...]
    old: OldPool | None = None


class Placement:
    """Puts a pool where it outlives this process, if there is somebody to keep it."""

    def __init__(self, around: Surroundings, model: Model, layout: PoolLayout, key: dict[str, Any]) -> None:
        self._around = around
        self._model = model
        self._layout = layout
        self._key = key

    def place(self) -> PlacedPool:
        """The old pool if it fits, else a new one. PoolError only when there is no memory at all."""
        if self._model.device.type != "cpu":
            pool = KvPool.on_device(self._model.device, self._model.kv_shape, self._layout)
            return PlacedPool(pool, ())
        self._await_holder()
        old = self._old()
        size_bytes = self._layout.end
        fd = create_host_pool(size_bytes) if old is None else old.fd
        pool = KvPool.over(map_pool(fd, size_bytes), self._model.kv_shape, self._layout)
        return PlacedPool(pool, self._held(fd, old), old)

    def _await_holder(self) -> None:
        """A holder that was killed is started again within a second or two; a pool that it never got is no use."""
        deadline_s = time.monotonic() + HOLDER_WAIT_S
        while self._around.holder is not None and time.monotonic() < deadline_s:
            with contextlib.suppress(PoolError):
                HolderClient(self._around.holder).list()
                return
            time.sleep(0.1)

    def _old(self) -> OldPool | None:
        around = self._around
        if around.adopt is None or around.holder is None:
            return None
        try:
            return find_old_pool(around.adopt, HolderClient(around.holder), self._layout, self._key)
        except MidstreamError as error:
            log.warning("event=not_adopted arena=%s reason=%s", around.adopt, error)
            return None

    def _held(self, fd: int, old: OldPool | None) -> tuple[str, ...]:
        """Give the pool to the holder; a pool that nobody keeps is not named."""
        around = self._around
        if around.holder is None:
            return ()
        owner = {"pid": os.getpid(), "fd": fd, "adopted_from": None if old is None else old.name}
        meta = PoolMeta(self._layout.end, self._layout, self._layout.fingerprint(), owner)
        try:
            HolderClient(around.holder).put(around.pool_name, fd, meta.to_json())
        except MidstreamError as error:
            log.warning("event=pool_not_held pool=%s reason=%s", around.pool_name, error)
            return ()
        return (around.pool_name,)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
