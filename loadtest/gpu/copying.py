"""How fast the mover copies and sums KV on a GPU, without any engine: many sessions that all wait at once.

Owns the order of what is measured, and the figures of one tier: sums, restores at once, the store, and beside them what
one contiguous copy does on this machine. What was copied is compared on the host, block by block, for some blocks of
every session. The rig is `copy_rig.py`, tier 1 is in `copying_memory.py`.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...session import vram
from ...session.errors import MidstreamError
from .copy_rig import (
    BLOCK_TOKENS,
    DEVICE,
    DISK_GENERATION,
    SESSION_BLOCKS,
    WAIT_S,
    Rig,
    layout_of,
    ok,
    read,
    session_of,
    tables,
)
from .copying_memory import POLL_S, measure_memory
from .results import Results

__all__ = ["BLOCK_TOKENS", "SESSION_BLOCKS", "layout_of", "measure", "tables"]

PART = "copy"
REFERENCE_BYTES = 4 << 30
ROUNDS = 5


def measure(folder: Path, results: Results, *, sessions: int) -> None:
    """All of it. MidstreamError with the mover's log where it does not do its work."""
    reference = _reference(results)
    measure_memory(PART, folder, results, reference)
    with tempfile.TemporaryDirectory(prefix="midstream-", dir="/dev/shm") as place, Rig(Path(place), sessions) as rig:
        try:
            _sums(rig, results)
            # First, for nothing is stored of a session from an owner that is not its newest.
            _disk(rig, results)
            for number in range(ROUNDS):
                _restores(rig, results, number)
        except (MidstreamError, OSError):
            print(rig.log(), flush=True)
            raise
        finally:
            (folder / "mover.log").write_text(rig.log())


def _sums(rig: Rig, results: Results) -> None:
    full = rig.sessions * SESSION_BLOCKS
    block_bytes = rig.source.layout.block_bytes
    # As in a sidecar: every worker is watched from its start, and so its pool mapped and its GPU in use before it is
    # needed.
    rig.ask({"op": "watch", "arena": str(rig.destination.arena), "worker": "b"})
    deadline_s = time.monotonic() + WAIT_S
    while rig.ask({"op": "status"})[0].get("pools", 0) < 1:
        if time.monotonic() > deadline_s:
            raise MidstreamError("the mover has not mapped the pool of the destination; its log is above")
        time.sleep(0.01)
    began_s = time.perf_counter()
    rig.ask({"op": "watch", "arena": str(rig.source.arena), "worker": "a"})
    deadline_s = time.monotonic() + WAIT_S
    while (status := rig.ask({"op": "status"})[0]).get("blocks_summed", 0) < full:
        if time.monotonic() > deadline_s:
            raise MidstreamError(f"the mover has summed {status.get('blocks_summed')} of {full} blocks: {status}")
        # A status is some work for the mover, too.
        time.sleep(POLL_S)
    took_s = time.perf_counter() - began_s
    results.add(
        PART, "sums, first look included", full * block_bytes / took_s / 1e9, "GB/s", ms=round(took_s * 1000, 2)
    )
    began_s = time.perf_counter()
    rig.ask({"op": "seal", "arena": str(rig.source.arena)})
    took_s = time.perf_counter() - began_s
    results.add(PART, "seal", 1000 * took_s, "ms", sessions=rig.sessions)


def _restores(rig: Rig, results: Results, number: int) -> None:
    """All sessions at once, from the dead worker's pool."""
    rig.zero_destination()
    restored = rig.restored(DISK_GENERATION + 1 + number, rig.sessions, {"arena": str(rig.source.arena)})
    account = rig.next_account(restored.known)
    results.add(
        PART, f"restore of {rig.sessions} sessions, round {number + 1}", restored.gb_per_s, "GB/s",
        bar=1000.0, at_least=True, ms=round(1000 * restored.took_s, 2),
        first_ms=round(1000 * min(restored.seconds), 2), last_ms=round(1000 * max(restored.seconds), 2),
        verified=restored.total("blocks_verified"), unverified=restored.total("blocks_unverified"),
        client_ms=round(1000 * restored.took_s - account.get("all_ms", 0.0), 2), mover=account,
    )  # fmt: skip
    results.add(PART, f"blocks that differ, round {number + 1}", rig.differing(), "blocks", bar=0)


def _disk(rig: Rig, results: Results) -> None:
    """One session into the store and back."""
    session, generation = session_of(0), DISK_GENERATION
    began_s = time.perf_counter()
    [stored] = rig.ask({"op": "snapshot", "arena": str(rig.source.arena), "session": session})
    took_s = time.perf_counter() - began_s
    size = SESSION_BLOCKS * rig.source.layout.block_bytes
    results.add(PART, "snapshot of one session to a store in memory", size / took_s / 1e9, "GB/s", told=stored)
    rig.zero_destination()
    [slot] = rig.wait_for(generation, 1)
    [answer] = rig.ask(rig.restore(0, generation, {"store": True}))
    slot.finish("abort")
    results.add(
        PART, "restore of one session from there", int(answer["bytes"]) / float(answer["seconds"]) / 1e9, "GB/s",
        tokens=answer["tokens"],
    )  # fmt: skip
    wrong = sum(
        read(rig.source, old) != read(rig.destination, new)
        for old, new in zip(rig.source.tables[0], rig.destination.tables[0], strict=True)
    )
    results.add(PART, "blocks that differ after the store", wrong, "blocks", bar=0)


def _reference(results: Results) -> dict[str, float]:
    """What one contiguous copy does here: on the card, out of it and into it, in GB/s."""
    from cuda.bindings import driver

    found: dict[str, float] = {}
    with vram.current(DEVICE):
        one = int(ok(driver.cuMemAlloc(REFERENCE_BYTES)))
        other = int(ok(driver.cuMemAlloc(REFERENCE_BYTES)))
        host = int(ok(driver.cuMemHostAlloc(REFERENCE_BYTES // 4, 0)))
        # Zeroes may be faster than what is copied in earnest.
        ok(driver.cuMemsetD32(one, 0x5BD1E995, REFERENCE_BYTES // 4))
        quarter = REFERENCE_BYTES // 4
        ways: tuple[tuple[str, int, Callable[[], Any]], ...] = (
            ("on the card", REFERENCE_BYTES, lambda: driver.cuMemcpyDtoDAsync(other, one, REFERENCE_BYTES, 0)),
            ("out", quarter, lambda: driver.cuMemcpyDtoHAsync(host, one, quarter, 0)),
            ("in", quarter, lambda: driver.cuMemcpyHtoDAsync(one, host, quarter, 0)),
        )
        for name, size, copy in ways:
            seconds = []
            for _ in range(6):
                began_s = time.perf_counter()
                ok(copy())
                ok(driver.cuCtxSynchronize())
                seconds.append(time.perf_counter() - began_s)
            found[name] = size / sorted(seconds[1:])[2] / 1e9
            results.add(PART, f"one contiguous copy {name}", found[name], "GB/s")
        ok(driver.cuMemFreeHost(host))
        for address in (one, other):
            ok(driver.cuMemFree(address))
    return found
