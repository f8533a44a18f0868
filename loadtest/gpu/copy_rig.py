"""Two engines that the mover copies KV between, played: pools of an 8B model's layout on a GPU, and their arenas.

Owns what is started and made, holder and mover among it, and the way to the mover's socket (docs/formats.md): what is
measured is what a sidecar would get. The source dies after its blocks were summed; the sessions of the destination all
wait. Measures nothing.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
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

BLOCK_TOKENS = 16
PLANE_BYTES = LARGE.token_bytes // LARGE.layers * BLOCK_TOKENS
SESSION_TOKENS = 4000
SESSION_BLOCKS = SESSION_TOKENS // BLOCK_TOKENS
PATTERN_BYTES = 64 << 20
WAIT_S = 60.0
# The mover writes its account when everybody has been answered.
TOLD_S = 2.0
# The source is generation 1; each restore is to a newer owner.
DISK_GENERATION = 2
# Blocks of each session that are compared on the host.
SAMPLED = 4
KEY = {"engine": "copy", "model": "8b"}
DEVICE = 0


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
class Worker:
    """A pool and its arena; `tables` are where its sessions lie."""

    name: str
    arena: Path
    writer: ArenaWriter
    pool: vram.DevicePool
    layout: PoolLayout
    tables: list[list[int]]


@dataclass(frozen=True, slots=True)
class Restored:
    """Restores that were asked for together: the mover's answers, and the time by the client's clock.

    `known` is how many of the mover's accounts there were before (`Rig.next_account`).
    """

    answers: list[dict[str, Any]]
    took_s: float
    known: int

    def total(self, name: str) -> int:
        """The sum of what all answers say of something."""
        return sum(int(answer[name]) for answer in self.answers)

    @property
    def gb_per_s(self) -> float:
        """All bytes by the client's time."""
        return self.total("bytes") / self.took_s / 1e9

    @property
    def seconds(self) -> list[float]:
        """How long each took by the mover's clock."""
        return [float(answer["seconds"]) for answer in self.answers]


class Rig:
    """Holder, mover, a source and a destination; `memory_bytes` is how much of the host's the mover may have."""

    def __init__(self, place: Path, sessions: int, *, memory_bytes: int = 0) -> None:
        self.place = place
        self.sessions = sessions
        self.memory_bytes = memory_bytes
        self.store = place / "store"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Rig":
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
        until(self._holder_answers, holder)
        options = ["--socket", str(mover_path), "--holder", str(holder_path), "--store", str(self.store)]
        if self.memory_bytes:
            options += ["--memory-bytes", str(self.memory_bytes), "--memory-bytes-per-s", str(1 << 40)]
        self.mover = self._process("midstream.sidecar.mover", *options)
        until(lambda: self._connects(mover_path), self.mover)
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

    def _worker(self, name: str, seed: str) -> Worker:
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
        return Worker(name, arena, writer, pool, layout, tables(self.sessions, seed))

    def _fill(self, pool: vram.DevicePool) -> None:
        """Random bytes, shifted by a word from piece to piece, so that no two blocks are alike."""
        from cuda.bindings import driver

        pattern = os.urandom(PATTERN_BYTES)
        with vram.current(DEVICE):
            for at in range(0, pool.size_bytes, PATTERN_BYTES):
                shift = 16 * (at // PATTERN_BYTES + 1) % PATTERN_BYTES
                piece = (pattern[shift:] + pattern[:shift])[: pool.size_bytes - at]
                ok(driver.cuMemcpyHtoD(pool.address + at, piece, len(piece)))
            ok(driver.cuCtxSynchronize())

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

    def wait_for(self, generation: int, sessions: int) -> list[SlotWriter]:
        """The first of the sessions wait in the destination, with a newer owner."""
        slots = []
        for index, table in enumerate(self.destination.tables[:sessions]):
            slot = self.destination.writer.admit(session_of(index), generation, SESSION_TOKENS - 1, "0" * 32, [7, 8])
            assert slot is not None
            slot.set_blocks(table)
            slot.report(LoadState.WAITING, 0, 0)
            slots.append(slot)
        return slots

    def restore(self, index: int, generation: int, place: dict[str, Any]) -> dict[str, Any]:
        """The request to restore a session from a place."""
        session = session_of(index)
        source = {"session": session, **({"generation": 1} if "arena" in place else {}), **place}
        to = {"arena": str(self.destination.arena), "generation": generation}
        return {"op": "restore", "session": session, "from": source, "to": to, "deadline_s": WAIT_S / 2}

    def restored(self, generation: int, sessions: int, place: dict[str, Any]) -> "Restored":
        """The first of the sessions, all at once, brought from a place to a newer owner that then gives them up."""
        known = len(self.accounts())
        slots = self.wait_for(generation, sessions)
        requests = [self.restore(index, generation, place) for index in range(sessions)]
        began_s = time.perf_counter()
        answers = self.ask(*requests)
        took_s = time.perf_counter() - began_s
        for slot in slots:
            assert slot.inbox() == (LoadState.DONE, SESSION_TOKENS)
            slot.finish("abort")
        return Restored(answers, took_s, known)

    def accounts(self) -> list[dict[str, float]]:
        """What the mover has said of where the time of restores went (docs/gpu.md), oldest first."""
        lines = [line.split("event=restores ", 1)[1] for line in self.log().splitlines() if "event=restores " in line]
        return [{name: float(value) for name, value in (part.split("=") for part in line.split())} for line in lines]

    def next_account(self, known: int) -> dict[str, float]:
        """The one after so many; empty where none comes."""
        deadline_s = time.monotonic() + TOLD_S
        while len(found := self.accounts()) <= known:
            if time.monotonic() > deadline_s:
                return {}
            time.sleep(0.005)
        return found[known]

    def log(self) -> str:
        """What holder and mover wrote."""
        path = self.place / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def differing(self) -> int:
        """Blocks of a sample that are not equal in the destination, read back to the host."""
        chance, wrong = Random(str(time.monotonic())), 0
        for old, new in zip(self.source.tables, self.destination.tables, strict=True):
            for ordinal in [0, SESSION_BLOCKS - 1, *(chance.randrange(SESSION_BLOCKS) for _ in range(SAMPLED))]:
                wrong += read(self.source, old[ordinal]) != read(self.destination, new[ordinal])
        return wrong

    def zero_destination(self) -> None:
        """So that nothing of a round before is taken for this one's."""
        from cuda.bindings import driver

        with vram.current(DEVICE):
            ok(driver.cuMemsetD8(self.destination.pool.address, 0, self.destination.pool.size_bytes))
            ok(driver.cuCtxSynchronize())


def read(worker: Worker, block: int) -> bytes:
    """A block's bytes on the host, plane by plane."""
    from cuda.bindings import driver

    raw = b""
    with vram.current(DEVICE):
        for start, end in worker.layout.spans(block):
            piece = bytearray(end - start)
            ok(driver.cuMemcpyDtoH(piece, worker.pool.address + start, end - start))
            raw += piece
    return raw


def ok(result: Any) -> Any:
    """What a driver call returned, without its status. MidstreamError unless that is success."""
    status, *values = result
    if int(status):
        raise MidstreamError(f"CUDA: {status.name}; nothing else may use this GPU while it is measured")
    return values[0] if values else None


def until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise MidstreamError(f"{process.args!r} did not come up; its log is above")
        time.sleep(0.02)
