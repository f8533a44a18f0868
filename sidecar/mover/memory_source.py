"""What is kept of a session as a source of copies, and what must be equal for it to be the session's KV.

Owns neither the bytes nor the index (`memory_tier.py`). Invariant: of a copy whose bytes are not equal to their sums
nothing is called copied.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .matching import SessionKv
from .memory_index import Chain, Kept
from .memory_map import MappedArea
from .memory_records import Story
from .pools import Copied, Copies, HostBlocks, Pool


class MemorySource:
    """Kept blocks as a source of copies: their numbers are places in the area."""

    def __init__(self, mapped: MappedArea, block_bytes: int) -> None:
        self._mapped = mapped
        self._block_bytes = block_bytes

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions, and compare what has arrived with the sums. Raises PoolError."""
        return [self._copied(destination, work, started) for work in works]

    def _copied(self, destination: Pool, work: Copies, started: Callable[[], object]) -> Copied:
        places = HostBlocks(self._mapped.view, self._mapped.address, work.sources, self._block_bytes)
        found = destination.load(places, work.destinations, started)
        pairs = enumerate(zip(found, work.expected, strict=True))
        damaged = next((index for index, (one, other) in pairs if one != other), None)
        if damaged is not None:
            return Copied(0, damaged, 0, work.first + damaged)
        return Copied(len(found) * self._block_bytes, len(found), 0)


@dataclass(frozen=True, slots=True)
class Offer:
    """What is kept of a session while somebody reads it."""

    chain: Chain
    blocks: tuple[Kept, ...]
    kv: SessionKv
    source: MemorySource


def key_digest(key: Mapping[str, Any]) -> str:
    """What stands for a compatibility key in the index."""
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def story_of(kv: SessionKv) -> Story:
    """What the kept blocks of a session have in common."""
    return Story(kv.session, kv.block_form, kv.ranks, key_digest(kv.key), *kv.prompt)
