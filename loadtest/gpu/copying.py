"""How fast the mover copies and sums KV on a GPU, without any engine: many sessions that all wait at once.

Owns two pools of an 8B model's layout, their arenas, a holder and a mover, and plays the engines: a source that dies
after its blocks were summed, and a destination whose sessions all wait. Speaks with the mover by its socket alone
(docs/formats.md), so what is measured is what a sidecar would get. Beside it, what one contiguous copy does on this
machine. What was copied is compared on the host, block by block, for some blocks of every session.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ...session import vram
from ...session.arena import create_arena
from ...session.arena_writer import ArenaWriter, SlotWriter
from ...session.errors import MidstreamError, PoolError
from ...session.held import HolderClient
from ...session.ids import SessionId
from ...session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from ...session.records import LoadState
from .models import LARGE
from .results import Results

PART = "copy"
BLOCK_TOKENS = 16
PLANE_BYTES = LARGE.token_bytes // LARGE.layers * BLOCK_TOKENS
SESSION_TOKENS = 4000
SESSION_BLOCKS = SESSION_TOKENS // BLOCK_TOKENS
PATTERN_BYTES = 64 << 20
REFERENCE_BYTES = 4 << 30
WAIT_S = 60.0
ROUNDS = 5
# The source is generation 1; each restore is to a newer owner.
DISK_GENERATION = 2
# Blocks of each session that are compared on the host.
SAMPLED = 4
KEY = {"engine": "copy", "model": "8b"}
# Tier 1 is measured by itself: what it copies while blocks are summed would be in the way of other figures.
MEMORY_SESSIONS = 16
MEMORY_SHARE = 0.8
DEVICE = 0


def measure(folder: Path, results: Results, *, sessions: int) -> None:
    """All of it. MidstreamError with the mover's log where it does not do its work."""
    reference = _reference(results)
    _tier1(folder, results, reference)
    with tempfile.TemporaryDirectory(prefix="midstream-", dir="/dev/shm") as place, _Rig(Path(place), sessions) as rig:
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


def layout_of(block_count: int) -> PoolLayout:
    """One plane a layer, as an engine on CUDA lays its blocks out."""
    planes = (Plane(n * block_count * PLANE_BYTES, PLANE_BYTES, PLANE_BYTES) for n in range(LARGE.layers))
    return PoolLayout(block_count, BLOCK_TOKENS, tuple(planes))


def tables(sessions: int, seed: str) -> list[list[int]]:
    """A block table for each session: blocks of a pool in no order, each in one table."""
    blocks = list(range(sessions * SESSION_BLOCKS))
    Random(seed).shuffle(blocks)
    return [blocks[i * SESSION_BLOCKS : (i + 1) * SESSION_BLOCKS] for i in range(sessions)]


def session_of(index: int) -> SessionId:
    """The id of a session."""
    return SessionId(hashlib.blake2b(f"copy/{index}".encode(), digest_size=16).hexdigest())


@dataclass(slots=True)
class _Worker:
    """A pool and its arena; `tables` are where its sessions lie."""

    name: str
    arena: Path
    writer: ArenaWriter
    pool: vram.DevicePool
    layout: PoolLayout
    tables: list[list[int]]


class _Rig:
    """Holder, mover, a source and a destination; `memory_bytes` is how much of the host's the mover may have."""

    def __init__(self, place: Path, sessions: int, *, memory_bytes: int = 0) -> None:
        self.place = place
        self.sessions = sessions
        self.memory_bytes = memory_bytes
        self.store = place / "store"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Rig":
        try:
            self._start()
        except BaseException:
            print(self.log(), flush=True)
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        holder_path, mover_path = self.place / "holder.sock", self.place / "mover.sock"
        holder = self._process("midstream.sidecar.holder", "--socket", str(holder_path))
        self.holder = HolderClient(holder_path)
        _until(self._holder_answers, holder)
        options = ["--socket", str(mover_path), "--holder", str(holder_path), "--store", str(self.store)]
        if self.memory_bytes:
            options += ["--memory-bytes", str(self.memory_bytes), "--memory-bytes-per-s", str(1 << 40)]
        self.mover = self._process("midstream.sidecar.mover", *options)
        _until(lambda: self._connects(mover_path), self.mover)
        self.source = self._worker("a", "source")
        self.destination = self._worker("b", "destination")
        self._fill(self.source.pool)
        # Sessions that have prefilled, and decoded two tokens: the KV of all positions but the newest is there.
        for index, table in enumerate(self.source.tables):
            slot = self.source.writer.admit(session_of(index), 1, SESSION_TOKENS - 1, "0" * 32)
            assert slot is not None
            slot.set_blocks(table)
            slot.append_tokens([7, 8])

    def _process(self, module: str, *options: str) -> "subprocess.Popen[bytes]":
        with (self.place / "log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *options], stderr=log, stdin=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _worker(self, name: str, seed: str) -> _Worker:
        layout = layout_of(self.sessions * SESSION_BLOCKS)
        pool = vram.create_device_pool(layout.end, DEVICE)
        self._stack.callback(pool.mapping.close)
        identity = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        owner = {"pid": os.getpid(), "fd": pool.fd}
        memory = cuda_memory(vram.device_uuid(DEVICE))
        meta = PoolMeta(pool.size_bytes, layout, layout.fingerprint(), owner, memory, identity)
        self.holder.put(f"{name}/1/0", pool.fd, meta.to_json())
        os.close(pool.fd)
        arena = self.place / f"{name}.arena"
        create_arena(arena, slot_count=256, page_count=4096)
        writer = ArenaWriter(arena)
        self._stack.callback(writer.close)
        writer.publish({"key": KEY, "pools": [f"{name}/1/0"]})
        return _Worker(name, arena, writer, pool, layout, tables(self.sessions, seed))

    def _fill(self, pool: vram.DevicePool) -> None:
        """Random bytes, shifted by a word from piece to piece, so that no two blocks are alike."""
        from cuda.bindings import driver

        pattern = os.urandom(PATTERN_BYTES)
        with vram.current(DEVICE):
            for at in range(0, pool.size_bytes, PATTERN_BYTES):
                shift = 16 * (at // PATTERN_BYTES + 1) % PATTERN_BYTES
                piece = (pattern[shift:] + pattern[:shift])[: pool.size_bytes - at]
                _ok(driver.cuMemcpyHtoD(pool.address + at, piece, len(piece)))
            _ok(driver.cuCtxSynchronize())

    def _holder_answers(self) -> bool:
        try:
            self.holder.list()
        except PoolError:
            return False
        return True

    def _connects(self, path: Path) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        if connection.connect_ex(str(path)):
            connection.close()
            return False
        connection.settimeout(WAIT_S)
        self._connection = self._stack.enter_context(connection)
        self._answers = self._stack.enter_context(connection.makefile("rb"))
        return True

    def ask(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Send all requests at once; their answers in the order of the requests. MidstreamError if one was refused."""
        lines = [json.dumps({"id": number, **request}).encode() + b"\n" for number, request in enumerate(requests)]
        self._connection.sendall(b"".join(lines))
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(requests):
            line = self._answers.readline()
            if not line:
                raise MidstreamError("the mover has closed the connection; its log is above")
            answer = json.loads(line)
            if not answer.get("ok"):
                raise MidstreamError(f"the mover: {answer}")
            found[answer["id"]] = answer
        return [found[number] for number in range(len(requests))]

    def log(self) -> str:
        """What holder and mover wrote."""
        path = self.place / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def differing(self) -> int:
        """Blocks of a sample that are not equal in the destination, read back to the host."""
        chance, wrong = Random(str(time.monotonic())), 0
        for old, new in zip(self.source.tables, self.destination.tables, strict=True):
            for ordinal in [0, SESSION_BLOCKS - 1, *(chance.randrange(SESSION_BLOCKS) for _ in range(SAMPLED))]:
                wrong += _read(self.source, old[ordinal]) != _read(self.destination, new[ordinal])
        return wrong

    def zero_destination(self) -> None:
        """So that nothing of a round before is taken for this one's."""
        from cuda.bindings import driver

        with vram.current(DEVICE):
            _ok(driver.cuMemsetD8(self.destination.pool.address, 0, self.destination.pool.size_bytes))
            _ok(driver.cuCtxSynchronize())


def _sums(rig: _Rig, results: Results) -> None:
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
        time.sleep(0.001)
    took_s = time.perf_counter() - began_s
    results.add(
        PART, "sums, first look included", full * block_bytes / took_s / 1e9, "GB/s", ms=round(took_s * 1000, 2)
    )
    began_s = time.perf_counter()
    rig.ask({"op": "seal", "arena": str(rig.source.arena)})
    took_s = time.perf_counter() - began_s
    results.add(PART, "seal", 1000 * took_s, "ms", sessions=rig.sessions)


def _restores(rig: _Rig, results: Results, number: int) -> None:
    """All sessions at once, from the dead worker's pool."""
    rig.zero_destination()
    generation = DISK_GENERATION + 1 + number
    slots: list[SlotWriter] = []
    for index, table in enumerate(rig.destination.tables):
        slot = rig.destination.writer.admit(session_of(index), generation, SESSION_TOKENS - 1, "0" * 32, [7, 8])
        assert slot is not None
        slot.set_blocks(table)
        slot.report(LoadState.WAITING, 0, 0)
        slots.append(slot)
    requests = [_restore(rig, index, generation, {"arena": str(rig.source.arena)}) for index in range(rig.sessions)]
    began_s = time.perf_counter()
    answers = rig.ask(*requests)
    took_s = time.perf_counter() - began_s
    copied = sum(int(answer["bytes"]) for answer in answers)
    verified = sum(int(answer["blocks_verified"]) for answer in answers)
    for slot in slots:
        assert slot.inbox() == (LoadState.DONE, SESSION_TOKENS)
        slot.finish("abort")
    results.add(
        PART, f"restore of {rig.sessions} sessions, round {number + 1}", copied / took_s / 1e9, "GB/s",
        bar=1000.0, at_least=True, ms=round(1000 * took_s, 2),
        first_ms=round(1000 * min(float(a["seconds"]) for a in answers), 2),
        last_ms=round(1000 * max(float(a["seconds"]) for a in answers), 2),
        verified=verified, unverified=sum(int(a["blocks_unverified"]) for a in answers),
    )  # fmt: skip
    results.add(PART, f"blocks that differ, round {number + 1}", rig.differing(), "blocks", bar=0)


def _restore(rig: _Rig, index: int, generation: int, place: dict[str, Any]) -> dict[str, Any]:
    session = session_of(index)
    source = {"session": session, **({"generation": 1} if "arena" in place else {}), **place}
    to = {"arena": str(rig.destination.arena), "generation": generation}
    return {"op": "restore", "session": session, "from": source, "to": to, "deadline_s": WAIT_S / 2}


def _tier1(folder: Path, results: Results, reference: dict[str, float]) -> None:
    """All sessions into memory of the host as their blocks are summed, and back at once."""
    block_bytes = layout_of(1).block_bytes
    full = MEMORY_SESSIONS * SESSION_BLOCKS
    # Extents have headers, and the last one of a size may be cut off.
    memory_bytes = full * block_bytes * 5 // 4
    with (
        tempfile.TemporaryDirectory(prefix="midstream-", dir="/dev/shm") as place,
        _Rig(Path(place), MEMORY_SESSIONS, memory_bytes=memory_bytes) as rig,
    ):
        try:
            rig.ask({"op": "watch", "arena": str(rig.destination.arena), "worker": "b"})
            began_s = time.perf_counter()
            while "event=tier1_pinned" not in rig.log():
                if "event=no_tier1" in rig.log() or time.perf_counter() - began_s > WAIT_S:
                    raise MidstreamError("the mover has no tier 1; its log is above")
                time.sleep(0.01)
            took_s = time.perf_counter() - began_s
            results.add(PART, "tier 1, opened and pinned", memory_bytes / took_s / 1e9, "GB/s", s=round(took_s, 2))
            _tier1_out(rig, results, full, MEMORY_SHARE * reference["out"])
            for number in range(ROUNDS):
                _tier1_in(rig, results, number, MEMORY_SHARE * reference["in"])
        except (MidstreamError, OSError):
            print(rig.log(), flush=True)
            raise
        finally:
            (folder / "mover-tier1.log").write_text(rig.log())


def _tier1_out(rig: _Rig, results: Results, full: int, bar: float) -> None:
    """From the first block that was kept to the last one; sums are taken meanwhile."""
    rig.ask({"op": "watch", "arena": str(rig.source.arena), "worker": "a"})
    first: tuple[float, int] | None = None
    deadline_s = time.monotonic() + WAIT_S
    while (status := rig.ask({"op": "status"})[0])["tier1_blocks_saved"] < full:
        if first is None and status["tier1_bytes_saved"]:
            first = time.perf_counter(), int(status["tier1_bytes_saved"])
        if time.monotonic() > deadline_s:
            raise MidstreamError(f"the mover has kept {status['tier1_blocks_saved']} of {full} blocks: {status}")
        time.sleep(0.001)
    assert first is not None
    took_s, copied = time.perf_counter() - first[0], int(status["tier1_bytes_saved"]) - first[1]
    results.add(
        PART, f"tier 1 out, {MEMORY_SESSIONS} sessions", copied / took_s / 1e9, "GB/s", bar=bar, at_least=True,
        ms=round(1000 * took_s, 2), damaged=status["tier1_blocks_damaged"], dropped=status["tier1_blocks_dropped"],
    )  # fmt: skip


def _tier1_in(rig: _Rig, results: Results, number: int, bar: float) -> None:
    """All sessions at once, as if their pool were lost."""
    rig.zero_destination()
    generation = DISK_GENERATION + 1 + number
    slots = []
    for index, table in enumerate(rig.destination.tables):
        slot = rig.destination.writer.admit(session_of(index), generation, SESSION_TOKENS - 1, "0" * 32, [7, 8])
        assert slot is not None
        slot.set_blocks(table)
        slot.report(LoadState.WAITING, 0, 0)
        slots.append(slot)
    began_s = time.perf_counter()
    answers = rig.ask(*(_restore(rig, index, generation, {"memory": True}) for index in range(rig.sessions)))
    took_s = time.perf_counter() - began_s
    for slot in slots:
        assert slot.inbox() == (LoadState.DONE, SESSION_TOKENS)
        slot.finish("abort")
    results.add(
        PART, f"tier 1 in, {rig.sessions} sessions, round {number + 1}",
        sum(int(answer["bytes"]) for answer in answers) / took_s / 1e9, "GB/s", bar=bar, at_least=True,
        ms=round(1000 * took_s, 2), first_ms=round(1000 * min(float(a["seconds"]) for a in answers), 2),
        verified=sum(int(answer["blocks_verified"]) for answer in answers),
    )  # fmt: skip
    results.add(PART, f"blocks that differ after tier 1, round {number + 1}", rig.differing(), "blocks", bar=0)


def _disk(rig: _Rig, results: Results) -> None:
    """One session into the store and back."""
    session, generation = session_of(0), DISK_GENERATION
    began_s = time.perf_counter()
    [stored] = rig.ask({"op": "snapshot", "arena": str(rig.source.arena), "session": session})
    took_s = time.perf_counter() - began_s
    size = SESSION_BLOCKS * rig.source.layout.block_bytes
    results.add(PART, "snapshot of one session to a store in memory", size / took_s / 1e9, "GB/s", told=stored)
    rig.zero_destination()
    slot = rig.destination.writer.admit(session, generation, SESSION_TOKENS - 1, "0" * 32, [7, 8])
    assert slot is not None
    slot.set_blocks(rig.destination.tables[0])
    slot.report(LoadState.WAITING, 0, 0)
    [answer] = rig.ask(_restore(rig, 0, generation, {"store": True}))
    results.add(
        PART, "restore of one session from there", int(answer["bytes"]) / float(answer["seconds"]) / 1e9, "GB/s",
        tokens=answer["tokens"],
    )  # fmt: skip
    wrong = sum(
        _read(rig.source, old) != _read(rig.destination, new)
        for old, new in zip(rig.source.tables[0], rig.destination.tables[0], strict=True)
    )
    results.add(PART, "blocks that differ after the store", wrong, "blocks", bar=0)


def _reference(results: Results) -> dict[str, float]:
    """What one contiguous copy does here: on the card, out of it and into it, in GB/s."""
    from cuda.bindings import driver

    found: dict[str, float] = {}
    with vram.current(DEVICE):
        one = int(_ok(driver.cuMemAlloc(REFERENCE_BYTES)))
        other = int(_ok(driver.cuMemAlloc(REFERENCE_BYTES)))
        host = int(_ok(driver.cuMemHostAlloc(REFERENCE_BYTES // 4, 0)))
        # Zeroes may be faster than what is copied in earnest.
        _ok(driver.cuMemsetD32(one, 0x5BD1E995, REFERENCE_BYTES // 4))
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
                _ok(copy())
                _ok(driver.cuCtxSynchronize())
                seconds.append(time.perf_counter() - began_s)
            found[name] = size / sorted(seconds[1:])[2] / 1e9
            results.add(PART, f"one contiguous copy {name}", found[name], "GB/s")
        _ok(driver.cuMemFreeHost(host))
        for address in (one, other):
            _ok(driver.cuMemFree(address))
    return found


def _read(worker: _Worker, block: int) -> bytes:
    """A block's bytes on the host, plane by plane."""
    from cuda.bindings import driver

    raw = b""
    with vram.current(DEVICE):
        for start, end in worker.layout.spans(block):
            piece = bytearray(end - start)
            _ok(driver.cuMemcpyDtoH(piece, worker.pool.address + start, end - start))
            raw += piece
    return raw


def _ok(result: Any) -> Any:
    """What a driver call returned, without its status. MidstreamError unless that is success."""
    status, *values = result
    if int(status):
        raise MidstreamError(f"CUDA: {status.name}; nothing else may use this GPU while it is measured")
    return values[0] if values else None


def _until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise MidstreamError(f"{process.args!r} did not come up; its log is above")
        time.sleep(0.02)
