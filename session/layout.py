"""Where the blocks of a pool lie, in bytes: what an engine says once and everybody else copies by.

Owns `PoolLayout` and `PoolMeta` with their JSON (docs/formats.md). Invariant: no byte belongs to two blocks, and a
layout that was read from JSON lies wholly inside its pool. It knows nothing of tensors or dtypes, and of devices only
their names: two pools hold the same thing in a block when their compatibility keys and their `fingerprint()` are equal,
whatever memory they lie in.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .errors import PoolError

PLANES_MAX = 1024
NAME_BYTES_MAX = 160
HOST = "host"
_CUDA = "cuda:"
_DEVICE = re.compile(_CUDA + r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_IDENTITY = re.compile(r"[0-9a-f]{32}")


def cuda_memory(gpu_uuid: str) -> str:
    """What a pool's meta calls the memory of a GPU."""
    return _CUDA + gpu_uuid


@dataclass(frozen=True, slots=True)
class Plane:
    """One part of every block: block b has the bytes `[offset + b * stride, + size_bytes)`."""

    offset: int
    stride: int
    size_bytes: int

    def end(self, block_count: int) -> int:
        """First byte after the last block's part."""
        return self.offset + (block_count - 1) * self.stride + self.size_bytes


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The blocks of one pool; a block's bytes are those of its planes, in order."""

    block_count: int
    block_tokens: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if self.block_count < 1 or self.block_tokens < 1:
            raise PoolError(
                f"pool layout: {self.block_count} blocks of {self.block_tokens} tokens; both must be at least 1"
            )
        if not 1 <= len(self.planes) <= PLANES_MAX:
            raise PoolError(f"pool layout: {len(self.planes)} planes; expected 1 to {PLANES_MAX}")
        for index, plane in enumerate(self.planes):
            if plane.offset < 0 or plane.size_bytes < 1:
                raise PoolError(f"pool layout: plane {index} {plane} must start at 0 or later and not be empty")
            if plane.stride < plane.size_bytes:
                raise PoolError(
                    f"pool layout: plane {index} has stride {plane.stride} below its size {plane.size_bytes}, "
                    "so its blocks would overlap; give the distance between two blocks"
                )
        _refuse_overlap(self)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all planes together."""
        return sum(plane.size_bytes for plane in self.planes)

    @property
    def end(self) -> int:
        """First byte after everything: the least size of a pool with this layout."""
        return max(plane.end(self.block_count) for plane in self.planes)

    def spans(self, block: int) -> list[tuple[int, int]]:
        """The (start, end) byte ranges of a block, one a plane. Raises PoolError for a block that does not exist."""
        if not 0 <= block < self.block_count:
            raise PoolError(
                f"block {block} is not in a pool of {self.block_count}; the block table is not of this pool"
            )
        return [(p.offset + block * p.stride, p.offset + block * p.stride + p.size_bytes) for p in self.planes]

    def check_fits(self, size_bytes: int) -> None:
        """Raise PoolError unless every block lies inside a pool of `size_bytes`."""
        if self.end > size_bytes:
            raise PoolError(
                f"pool layout needs {self.end} bytes but the pool has {size_bytes}; "
                "register the layout of the memory that was really allocated"
            )

    def fingerprint(self) -> str:
        """32 hex digits that say how a block's bytes are made up (not where the blocks lie, nor how many there are).

        Pools of different sizes, whose planes therefore lie elsewhere, can still take each other's blocks.
        """
        form = {"block_tokens": self.block_tokens, "plane_bytes": [p.size_bytes for p in self.planes]}
        text = json.dumps(form, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The layout as its JSON object."""
        return {
            "block_count": self.block_count,
            "block_tokens": self.block_tokens,
            "planes": [[p.offset, p.stride, p.size_bytes] for p in self.planes],
        }

    @classmethod
    def from_json(cls, body: object, size_bytes: int) -> "PoolLayout":
        """Read a layout and check it against the size of its pool; PoolError says what is wrong with it."""
        if not isinstance(body, Mapping):
            raise PoolError(f"pool layout: expected an object, got {body!r:.80}")
        planes = body.get("planes")
        if not isinstance(planes, list) or len(planes) > PLANES_MAX:
            raise PoolError(f"pool layout: planes must be a list of at most {PLANES_MAX}, got {planes!r:.80}")
        parsed = []
        for index, plane in enumerate(planes):
            if not isinstance(plane, list) or len(plane) != 3:
                raise PoolError(f"pool layout: plane {index} must be [offset, stride, bytes], got {plane!r:.80}")
            parsed.append(Plane(*(_whole(value, f"plane {index}") for value in plane)))
        layout = cls(
            _whole(body.get("block_count"), "block_count"),
            _whole(body.get("block_tokens"), "block_tokens"),
            tuple(parsed),
        )
        layout.check_fits(size_bytes)
        return layout


@dataclass(frozen=True, slots=True)
class PoolMeta:
    """What the holder keeps beside a pool's descriptor.

    `memory` is where the pool lies, `HOST` or `cuda_memory(...)`. Descriptors of host memory tell by themselves whether
    they are the same memory; those of a GPU do not, so their maker draws an `identity` that stays with the memory.
    """

    size_bytes: int
    layout: PoolLayout
    fingerprint: str
    owner: Mapping[str, Any]
    memory: str = HOST
    identity: str = ""

    def __post_init__(self) -> None:
        if self.memory != HOST and not _DEVICE.fullmatch(self.memory):
            raise PoolError(f"pool meta: memory {self.memory!r:.60} is unknown; expected {HOST} or {_CUDA}<GPU UUID>")
        if self.memory != HOST and not _IDENTITY.fullmatch(self.identity):
            raise PoolError(
                f"pool meta: identity {self.identity!r:.40} of a device pool must be 32 hex digits; "
                "draw one when the memory is made, and keep it when it is adopted"
            )

    @property
    def gpu_uuid(self) -> str | None:
        """The GPU that a device pool lies on; None for one in host memory."""
        return None if self.memory == HOST else self.memory.removeprefix(_CUDA)

    def to_json(self) -> dict[str, Any]:
        """The meta as its JSON object."""
        return {
            "size_bytes": self.size_bytes,
            "layout": self.layout.to_json(),
            "fingerprint": self.fingerprint,
            "owner": dict(self.owner),
            "memory": self.memory,
            **({"identity": self.identity} if self.identity else {}),
        }

    @classmethod
    def from_json(cls, body: object) -> "PoolMeta":
        """Read the meta of a pool; PoolError says what is wrong with it."""
        if not isinstance(body, Mapping):
            raise PoolError(f"pool meta: expected an object, got {body!r:.80}")
        size_bytes = _whole(body.get("size_bytes"), "size_bytes")
        fingerprint, owner = body.get("fingerprint"), body.get("owner", {})
        if not isinstance(fingerprint, str) or not isinstance(owner, Mapping):
            raise PoolError("pool meta: fingerprint must be a string and owner an object")
        memory, identity = body.get("memory", HOST), body.get("identity", "")
        if not isinstance(memory, str) or not isinstance(identity, str):
            raise PoolError("pool meta: memory and identity must be strings")
        layout = PoolLayout.from_json(body.get("layout"), size_bytes)
        if fingerprint != layout.fingerprint():
            raise PoolError(
                f"pool meta: fingerprint {fingerprint!r:.40} is not that of the layout; send layout.fingerprint()"
            )
        return cls(size_bytes, layout, fingerprint, dict(owner), memory, identity)


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise PoolError(f"pool layout: {what} must be a whole number that is not negative, got {value!r:.80}")
    return value


def _refuse_overlap(layout: PoolLayout) -> None:
    """Planes may lie one after the other, or interleave with one common stride; anything else shares bytes or may."""
    planes = sorted(layout.planes, key=lambda p: p.offset)
    # Mostly planes follow each other; then one pass is enough.
    if all(a.end(layout.block_count) <= b.offset for a, b in pairwise(planes)):
        return
    for index, left in enumerate(planes):
        left_end = left.end(layout.block_count)
        for right in planes[index + 1 :]:
            if right.offset >= left_end:
                break
            gap = (right.offset - left.offset) % left.stride
            if left.stride != right.stride or gap < left.size_bytes or gap + right.size_bytes > left.stride:
                raise PoolError(
                    f"pool layout: {left} and {right} share bytes; planes must be disjoint or interleave in one stride"
                )
