"""A worker whose pool lies on a GPU, filled as an engine fills it; the KV is that of `mover_rig`."""

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midstream.session import vram
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.held import HolderClient
from midstream.session.layout import PoolLayout, PoolMeta, cuda_memory
from support.mover_rig import BLOCK_TOKENS, KEY, PLANES, TOKEN_BYTES, Worker, kv, layout_of


def done(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA driver returned; AssertionError unless it succeeded."""
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


def write_bytes(address: int, raw: bytes, device: int = 0) -> None:
    """Put bytes into VRAM, and wait until they are there."""
    from cuda.bindings import driver

    with vram.current(device):
        done(driver.cuMemcpyHtoD(address, raw, len(raw)))
        done(driver.cuCtxSynchronize())


def read_bytes(address: int, size_bytes: int, device: int = 0) -> bytes:
    """Bytes out of VRAM."""
    from cuda.bindings import driver

    raw = bytearray(size_bytes)
    with vram.current(device):
        done(driver.cuMemcpyDtoH(raw, address, size_bytes))
    return bytes(raw)


def block_bytes(address: int, layout: PoolLayout, block: int, device: int = 0) -> bytes:
    """A block's bytes, all planes in order."""
    return b"".join(read_bytes(address + start, end - start, device) for start, end in layout.spans(block))


class DeviceWorker(Worker):
    """One worker epoch with its pool in VRAM. `adopted`: who had this pool before, whose it was under another name."""

    def __init__(
        self,
        folder: Path,
        name: str,
        holder: HolderClient,
        *,
        layout: PoolLayout | None = None,
        adopted: "DeviceWorker | None" = None,
        device: int = 0,
        slot_count: int = 64,
    ) -> None:
        self.device = device
        self.layout = layout or (adopted.layout if adopted else layout_of(256))
        if adopted is None:
            made = vram.create_device_pool(self.layout.end, device)
            self.fd, self.size, self.address = made.fd, made.size_bytes, made.address
            memory, identity = cuda_memory(vram.device_uuid(device)), uuid.uuid4().hex
            owner = {"pid": os.getpid(), "fd": self.fd}
            self.meta = PoolMeta(self.size, self.layout, self.layout.fingerprint(), owner, memory, identity)
        else:
            self.fd, self.size, self.address, self.meta = adopted.fd, adopted.size, adopted.address, adopted.meta
        self.pool_name = f"{name}/1/0"
        holder.put(self.pool_name, self.fd, self.meta.to_json())
        self.arena = folder / f"{name}.arena"
        create_arena(self.arena, slot_count=slot_count, page_count=4 * slot_count)
        self.writer = ArenaWriter(self.arena)
        self.writer.publish({"key": KEY, "pools": [self.pool_name]})

    def write(self, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> None:
        """Compute the KV of positions into their blocks."""
        for position in positions:
            for plane in range(PLANES):
                write_bytes(self._at(position, plane, blocks), kv(tokens, position, plane), self.device)

    def right(self, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> list[int]:
        """Which of the positions hold exactly the KV of these tokens."""
        return [
            position
            for position in positions
            if all(
                read_bytes(self._at(position, plane, blocks), TOKEN_BYTES, self.device) == kv(tokens, position, plane)
                for plane in range(PLANES)
            )
        ]

    def close(self) -> None:
        """Let go of the arena and of the descriptor; the mapping goes with the process."""
        self.writer.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def _at(self, position: int, plane: int, blocks: Sequence[int]) -> int:
        start, _ = self.layout.spans(blocks[position // BLOCK_TOKENS])[plane]
        return self.address + start + position % BLOCK_TOKENS * TOKEN_BYTES
