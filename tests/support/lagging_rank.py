"""A plant in an engine: at a test's word one rank falls a step behind, and dies while the engine goes on.

A plugin of vLLM's, for tests alone; it works on the plugin of midstream from outside. Once the file that
LAGGING_RANK_AT names is there, the worker's rank that it names takes back all that it has written into its sessions'
blocks in one step, and does not commit that step, though it answers as ever; in the step after that it is killed.
"""

import os
import signal
from pathlib import Path
from typing import Any

VARIABLE = "LAGGING_RANK_AT"
# The plugin's name in an engine: this file is found there by it.
PLUGIN = "midstream_lagging_rank"


def plant(folder: Path, at: Path) -> dict[str, str]:
    """What engines are to be started with, so that a rank lags once the file `at` says "WORKER RANK"."""
    information = folder / f"{PLUGIN}-0.dist-info"
    information.mkdir(parents=True)
    (folder / f"{PLUGIN}.py").symlink_to(Path(__file__).resolve())
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:register\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: str(at)}


class Lag:
    """What one rank remembers of the step before."""

    def __init__(self) -> None:
        self.before: dict[int, bytes] | None = None
        self.is_behind = False

    def in_place_of(self, writer: Any, rank: int, step: int, commit: Any) -> bool:
        """Commit a step, or fall behind in it."""
        if self.is_behind:
            os.kill(os.getpid(), signal.SIGKILL)
        if not _is_meant(rank):
            return bool(commit(writer, step))
        memory, layout = _pool(rank)
        now = {block: _read(memory, layout, block) for block in _blocks()}
        if self.before is None:
            # Only a step that has something to take back will do.
            self.before = now or None
            return bool(commit(writer, step))
        for block in now:
            _write(memory, layout, block, self.before.get(block, bytes(layout.block_bytes)))
        self.is_behind = True
        return True


def register() -> None:
    """The entry point: stand before what commits a rank's steps."""
    if not os.environ.get(VARIABLE):
        return
    from midstream.session.commit_writer import CommitWriter

    original = CommitWriter.commit
    lags: dict[int, Lag] = {}

    def commit(self: Any, step: int) -> bool:
        return lags.setdefault(self._rank, Lag()).in_place_of(self, self._rank, step, original)

    if original.__module__ != __name__:
        CommitWriter.commit = commit  # type: ignore[method-assign]


def _is_meant(rank: int) -> bool:
    from midstream.adapters.plugin_settings import plugin_settings

    settings, path = plugin_settings(), Path(os.environ[VARIABLE])
    return settings is not None and path.exists() and path.read_text() == f"{settings.worker} {rank}"


def _pool(rank: int) -> tuple[Any, Any]:
    """The memory of this rank's pool and how it is laid out, as everybody else finds it."""
    from midstream.adapters.plugin_settings import plugin_settings
    from midstream.session.held import HolderClient, map_pool
    from midstream.session.layout import PoolMeta

    settings = plugin_settings()
    assert settings is not None
    fd, body = HolderClient(settings.holder).get(settings.pool_name(rank))
    try:
        meta = PoolMeta.from_json(body)
        return map_pool(fd, meta.size_bytes), meta.layout
    finally:
        os.close(fd)


def _blocks() -> set[int]:
    """The blocks of all sessions of this engine."""
    from midstream.adapters.plugin_settings import plugin_settings
    from midstream.session.arena import ArenaReader, SlotState

    settings = plugin_settings()
    assert settings is not None
    assert settings.arena is not None
    reader = ArenaReader(settings.arena)
    try:
        return {b for slot in reader.slots() if slot.state is SlotState.LIVE for b in reader.table(slot).blocks}
    finally:
        reader.close()


def _read(memory: Any, layout: Any, block: int) -> bytes:
    return b"".join(memory[start:end] for start, end in layout.spans(block))


def _write(memory: Any, layout: Any, block: int, raw: bytes) -> None:
    at = 0
    for start, end in layout.spans(block):
        memory[start:end] = raw[at : at + end - start]
        at += end - start
