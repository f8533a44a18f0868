"""A GPU that has done everything at once and nothing at all, and workers whose pools lie on it: what is left is Python.

Blocks are never copied, and each has the sum that a kernel begins with, before as after; so whatever is compared is
equal, and what a mover costs beside the card's own work can be counted.
"""

import contextlib
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from midstream.session import vram
from midstream.session.arena import LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.errors import PoolError
from midstream.session.ids import SessionId
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from midstream.sidecar.mover import device, sources
from midstream.sidecar.mover.device import Device
from midstream.sidecar.mover.device_calls import Calls, Faults
from midstream.sidecar.mover.device_pool import DevicePool
from midstream.sidecar.mover.pools import Pool

GPU = "GPU-00000000-0000-0000-0000-000000000000"
# An 8B model's: 2 MiB a block, 4,000 tokens a session.
BLOCK_TOKENS, PLANE_BYTES, PLANES = 16, 64 << 10, 32
SESSION_BLOCKS = 250
SESSION_TOKENS = SESSION_BLOCKS * BLOCK_TOKENS
PROMPT_HASH = "0" * 32


class Status(int):
    name = "CUDA_SUCCESS"


class IdleDriver:
    """The calls of a driver; `called` is how often each was made."""

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        values = {"cuMemAlloc": (1 << 40,), "cuStreamCreateWithPriority": (1,), "cuCtxGetStreamPriorityRange": (0, -5)}
        answer = (Status(0), *values.get(name, ()))

        def call(*_: object) -> tuple[Any, ...]:
            self.called[name] += 1
            return answer

        return call


class Idle:
    """The GPU, and the pools of workers on it by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = IdleDriver()
        self.pools: dict[str, Pool] = {}

        @contextlib.contextmanager
        def current(ordinal: int) -> Iterator[None]:
            yield

        def map_pool(fd: int, size_bytes: int, ordinal: int) -> vram.DeviceMapping:
            mapping = vram.DeviceMapping(1 << 41, size_bytes, ordinal)
            mapping._closed = True
            return mapping

        def fetch(holder: object, devices: object, names: Sequence[str], arena: object) -> Pool:
            return self.pools[names[0]]

        monkeypatch.setattr(vram, "current", current)
        monkeypatch.setattr(vram, "map_device_pool", map_pool)
        monkeypatch.setattr(sources, "_fetch", fetch)
        monkeypatch.setattr(Device, "_load", lambda self: {"sum_blocks": 1, "copy_blocks": 2})
        monkeypatch.setattr(Device, "_prove", lambda self: None)
        self.device = Device(0, Calls(self.driver, Faults(_unheard_of), GPU))
        assert device.vram is vram


def _unheard_of(text: str) -> None:
    raise PoolError(text)


class IdleWorker:
    """A worker with so many sessions' room; `tables` are blocks in no order, as an engine has them."""

    def __init__(self, folder: Path, name: str, gpu: Idle, sessions: int) -> None:
        count = sessions * SESSION_BLOCKS
        planes = (Plane(n * count * PLANE_BYTES, PLANE_BYTES, PLANE_BYTES) for n in range(PLANES))
        layout = PoolLayout(count, BLOCK_TOKENS, tuple(planes))
        identity = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        meta = PoolMeta(layout.end, layout, layout.fingerprint(), {}, cuda_memory(GPU), identity)
        fd = os.memfd_create(name)
        gpu.pools[f"{name}/1/0"] = DevicePool(gpu.device, f"{name}/1/0", fd, meta)
        os.close(fd)
        self.arena = folder / f"{name}.arena"
        create_arena(self.arena, slot_count=256, page_count=2048)
        self.writer = ArenaWriter(self.arena)
        self.writer.publish({"key": {"model": "8b"}, "pools": [f"{name}/1/0"]})
        blocks = list(range(count))
        Random(name).shuffle(blocks)
        self.tables = [blocks[n * SESSION_BLOCKS : (n + 1) * SESSION_BLOCKS] for n in range(sessions)]

    def run(self) -> None:
        """All sessions have prefilled, and decoded two tokens."""
        for index, table in enumerate(self.tables):
            slot = self._admit(index, 1)
            slot.set_blocks(table)
            slot.append_tokens([7, 8])

    def wait(self, generation: int) -> list[SlotWriter]:
        """All sessions wait for their KV."""
        slots = []
        for index, table in enumerate(self.tables):
            slot = self._admit(index, generation, [7, 8])
            slot.set_blocks(table)
            slot.report(LoadState.WAITING, 0, 0)
            slots.append(slot)
        return slots

    def _admit(self, index: int, generation: int, outputs: Sequence[int] = ()) -> SlotWriter:
        slot = self.writer.admit(session_of(index), generation, SESSION_TOKENS - 1, PROMPT_HASH, outputs)
        assert slot is not None
        return slot


def session_of(index: int) -> SessionId:
    """The id of a session."""
    return SessionId(f"{index + 1:032x}")


class CallCount:
    """How many functions of midstream's were called in this thread while it was entered."""

    def __init__(self) -> None:
        self.count = 0
        self._folders = tuple(os.path.dirname(str(module.__file__)) for module in (vram, device))

    def __enter__(self) -> "CallCount":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._folders):
            self.count += 1
