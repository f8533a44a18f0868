"""Real holder and mover processes, and a worker's arena and pool filled as an engine fills them.

The KV of a position is a function of all tokens up to it, so a wrong position, a wrong session or a torn copy shows.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from midstream.session.arena import LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient, create_host_pool, map_pool
from midstream.session.ids import SessionId
from midstream.session.layout import Plane, PoolLayout, PoolMeta

BLOCK_TOKENS = 4
TOKEN_BYTES = 64
PLANES = 4
KEY = {"engine": "rig", "model": "m"}


def layout_of(block_count: int, gap_bytes: int = 0) -> PoolLayout:
    """PLANES planes one after the other, `gap_bytes` between them."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    return PoolLayout(
        block_count,
        BLOCK_TOKENS,
        tuple(Plane(n * (block_count * size + gap_bytes), size, size) for n in range(PLANES)),
    )


def kv(tokens: Sequence[int], position: int, plane: int) -> bytes:
    """The KV of a position in a plane: of all tokens up to it."""
    text = f"{plane}:{position}:{list(tokens[: position + 1])}".encode()
    return hashlib.blake2b(text, digest_size=64).digest()


def prompt_hash(prompt: Sequence[int]) -> str:
    """A hash that differs when the prompt does."""
    return hashlib.blake2b(repr(list(prompt)).encode(), digest_size=16).hexdigest()


class Worker:
    """One worker epoch: its arena, its pool (held), and sessions in them."""

    def __init__(
        self,
        folder: Path,
        name: str,
        holder: HolderClient,
        *,
        block_count: int = 64,
        gap_bytes: int = 0,
        key: dict[str, object] | None = None,
        pool: "Worker | None" = None,
    ) -> None:
        self.layout = pool.layout if pool else layout_of(block_count, gap_bytes)
        self.size = self.layout.end
        self.fd = pool.fd if pool else create_host_pool(self.size)
        self.view = map_pool(self.fd, self.size)
        self.pool_name = pool.pool_name if pool else f"{name}/1/0"
        self.meta = PoolMeta(self.size, self.layout, self.layout.fingerprint(), {"pid": os.getpid(), "fd": self.fd})
        if not pool:
            holder.put(self.pool_name, self.fd, self.meta.to_json())
        self.arena = folder / f"{name}.arena"
        create_arena(self.arena, slot_count=16, page_count=64)
        self.writer = ArenaWriter(self.arena)
        self.writer.publish({"key": KEY if key is None else key, "pools": [self.pool_name]})

    def write(self, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> None:
        """Compute the KV of positions into their blocks."""
        for position in positions:
            for plane in range(PLANES):
                start, _ = self.layout.spans(blocks[position // BLOCK_TOKENS])[plane]
                at = start + position % BLOCK_TOKENS * TOKEN_BYTES
                self.view[at : at + TOKEN_BYTES] = kv(tokens, position, plane)

    def right(self, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> list[int]:
        """Which of the positions hold exactly the KV of these tokens."""
        good = []
        for position in positions:
            found = []
            for plane in range(PLANES):
                start, _ = self.layout.spans(blocks[position // BLOCK_TOKENS])[plane]
                at = start + position % BLOCK_TOKENS * TOKEN_BYTES
                found.append(self.view[at : at + TOKEN_BYTES] == kv(tokens, position, plane))
            if all(found):
                good.append(position)
        return good

    def run(
        self,
        session: SessionId,
        prompt: Sequence[int],
        outputs: Sequence[int],
        blocks: Sequence[int],
        generation: int = 1,
    ) -> SlotWriter:
        """A session that has prefilled and decoded so far: KV of all but the newest output."""
        slot = self.writer.admit(session, generation, len(prompt), prompt_hash(prompt))
        assert slot is not None
        slot.set_blocks(blocks)
        self.write([*prompt, *outputs], range(len(prompt) + len(outputs) - 1), blocks)
        slot.append_tokens(outputs)
        return slot

    def decode(
        self, slot: SlotWriter, prompt: Sequence[int], outputs: list[int], blocks: Sequence[int], token: int
    ) -> None:
        """One step: KV of the newest output, then the next output."""
        position = len(prompt) + len(outputs) - 1
        self.write([*prompt, *outputs], range(position, position + 1), blocks)
        slot.append_tokens([token])
        outputs.append(token)

    def wait(
        self,
        session: SessionId,
        prompt: Sequence[int],
        outputs: Sequence[int],
        blocks: Sequence[int],
        generation: int = 2,
    ) -> SlotWriter:
        """A resumed session that waits for its KV."""
        slot = self.writer.admit(session, generation, len(prompt), prompt_hash(prompt), outputs)
        assert slot is not None
        slot.set_blocks(blocks)
        slot.report(LoadState.WAITING, 0, 0)
        return slot

    def close(self) -> None:
        """Unmap; the arena file and the held pool stay."""
        self.writer.close()
        self.view.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)


class Processes:
    """A holder and a mover as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holder_path = folder / "holder.sock"
        self.mover_path = folder / "mover.sock"
        self.holder: subprocess.Popen[bytes] | None = None
        self.mover: subprocess.Popen[bytes] | None = None

    def start_holder(self) -> HolderClient:
        """Start the holder and wait until it answers."""
        self.holder = subprocess.Popen(
            [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(self.holder_path)],
            start_new_session=True,
        )
        client = HolderClient(self.holder_path)
        _until(lambda: _answers(client), self.holder)
        return client

    def start_mover(self, *options: str) -> Path:
        """Start the mover and wait until its socket is there."""
        with contextlib.suppress(OSError):
            self.mover_path.unlink()
        command = [sys.executable, "-X", "dev", "-W", "error", "-m", "midstream.sidecar.mover"]
        with (self.folder / "mover.log").open("ab") as log:
            self.mover = subprocess.Popen(
                [*command, "--socket", str(self.mover_path), "--holder", str(self.holder_path), *options],
                start_new_session=True,
                stderr=log,
            )
        _until(lambda: _listens(self.mover_path), self.mover)
        return self.mover_path

    def log(self) -> str:
        """What the mover wrote to its log, if one was started."""
        path = self.folder / "mover.log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        """Kill both."""
        for process in (self.mover, self.holder):
            if process is not None:
                process.kill()
                process.wait()


def _answers(client: HolderClient) -> bool:
    try:
        client.list()
    except PoolError:
        return False
    return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(str(path)) == 0


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{process.args!r} did not come up")
        time.sleep(0.02)
