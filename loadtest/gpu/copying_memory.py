"""Tier 1 on a GPU: how fast blocks go out into memory of the host and come back, and what restores cost beside that.

Measured by itself, for what it copies while blocks are summed would be in the way of other figures. Owns these figures;
the rig is `copy_rig.py`.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...session.errors import MidstreamError
from .copy_rig import DISK_GENERATION, SESSION_BLOCKS, WAIT_S, Rig, layout_of
from .results import Results

ROUNDS = 5
SESSIONS = 16
# What of one contiguous copy over the link is asked for.
SHARE = 0.8
# Of these so many are restored while the others go out.
BESIDE = 8
# A status is some work for the mover, too.
POLL_S = 0.004


def measure_memory(part: str, folder: Path, results: Results, reference: Mapping[str, float]) -> None:
    """Out, in, and restores beside it. MidstreamError with the mover's log where it does not do its work."""
    with _opened(folder / "mover-tier1.log") as rig:
        size, took_s = rig.memory_bytes, _pinned(rig)
        results.add(part, "tier 1, opened and pinned", size / took_s / 1e9, "GB/s", s=round(took_s, 2))
        _out(part, rig, results, SHARE * reference["out"])
        for number in range(ROUNDS):
            _in(part, rig, results, number, SHARE * reference["in"])
    with _opened(folder / "mover-tier1-beside.log") as rig:
        _pinned(rig)
        _beside(part, rig, results)


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[Rig]:
    """A rig whose mover has room for all blocks."""
    # Extents have headers, and the last one of a size may be cut off.
    memory_bytes = SESSIONS * SESSION_BLOCKS * layout_of(1).block_bytes * 5 // 4
    with (
        tempfile.TemporaryDirectory(prefix="midstream-", dir="/dev/shm") as place,
        Rig(Path(place), SESSIONS, memory_bytes=memory_bytes) as rig,
    ):
        try:
            yield rig
        except (MidstreamError, OSError):
            print(rig.log(), flush=True)
            raise
        finally:
            log.write_text(rig.log())


def _pinned(rig: Rig) -> float:
    """Wait until the memory is there and pinned; how many seconds that took."""
    rig.ask({"op": "watch", "arena": str(rig.destination.arena), "worker": "b"})
    began_s = time.perf_counter()
    while "event=tier1_pinned" not in rig.log():
        if "event=no_tier1" in rig.log() or time.perf_counter() - began_s > WAIT_S:
            raise MidstreamError("the mover has no tier 1; its log is above")
        time.sleep(0.01)
    return time.perf_counter() - began_s


def _saved(rig: Rig, least: int) -> dict[str, Any]:
    """The status once so many blocks are kept."""
    deadline_s = time.monotonic() + WAIT_S
    while (status := rig.ask({"op": "status"})[0])["tier1_blocks_saved"] < least:
        if time.monotonic() > deadline_s:
            raise MidstreamError(f"the mover has kept {status['tier1_blocks_saved']} of {least} blocks: {status}")
        time.sleep(POLL_S)
    return status


def _out(part: str, rig: Rig, results: Results, bar: float) -> None:
    """From the first block that was seen to be kept to the last one; sums are taken meanwhile."""
    rig.ask({"op": "watch", "arena": str(rig.source.arena), "worker": "a"})
    before, began_s = _saved(rig, 1), time.perf_counter()
    after = _saved(rig, SESSIONS * SESSION_BLOCKS)
    took_s, copied = time.perf_counter() - began_s, int(after["tier1_bytes_saved"]) - int(before["tier1_bytes_saved"])
    # Of all calls: how long they took together, and what the mover's loop did for them.
    told = {f"{name}_ms": round(1000 * float(after[f"tier1_{name}_s"]), 1) for name in ("copy", "look", "enter")}
    results.add(
        part, f"tier 1 out, {SESSIONS} sessions", copied / took_s / 1e9, "GB/s", bar=bar, at_least=True,
        ms=round(1000 * took_s, 2), damaged=after["tier1_blocks_damaged"], dropped=after["tier1_blocks_dropped"],
        calls=after["tier1_calls"], **told,
    )  # fmt: skip


def _in(part: str, rig: Rig, results: Results, number: int, bar: float) -> None:
    """All sessions at once, as if their pool were lost."""
    rig.zero_destination()
    restored = rig.restored(DISK_GENERATION + 1 + number, rig.sessions, {"memory": True})
    results.add(
        part, f"tier 1 in, {rig.sessions} sessions, round {number + 1}", restored.gb_per_s, "GB/s",
        bar=bar, at_least=True, ms=round(1000 * restored.took_s, 2), first_ms=round(1000 * min(restored.seconds), 2),
        verified=restored.total("blocks_verified"), mover=rig.next_account(restored.known),
    )  # fmt: skip
    results.add(part, f"blocks that differ after tier 1, round {number + 1}", rig.differing(), "blocks", bar=0)


def _beside(part: str, rig: Rig, results: Results) -> None:
    """Restores from the pool while blocks go out as fast as they can, and the same when none does."""
    rig.ask({"op": "watch", "arena": str(rig.source.arena), "worker": "a"})
    # Of those that are restored all are kept by then, and the others go out still.
    before = _saved(rig, BESIDE * SESSION_BLOCKS)
    for number, name in enumerate(("beside tier 1 out", "with tier 1 quiet")):
        restored = rig.restored(DISK_GENERATION + 1 + number, BESIDE, {"arena": str(rig.source.arena)})
        [after] = rig.ask({"op": "status"})
        results.add(
            part, f"restore of {BESIDE} sessions {name}", 1000 * restored.took_s, "ms",
            gb_s=round(restored.gb_per_s), verified=restored.total("blocks_verified"),
            out_meanwhile=int(after["tier1_blocks_saved"]) - int(before["tier1_blocks_saved"]),
            mover=rig.next_account(restored.known),
        )  # fmt: skip
        before = _saved(rig, SESSIONS * SESSION_BLOCKS)
