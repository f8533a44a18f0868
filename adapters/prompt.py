"""How a prompt is identified, the same in every engine: blake2b-128 over its token ids. Standard library only."""

import hashlib
import struct
from collections.abc import Sequence


def prompt_hash(token_ids: Sequence[int]) -> str:
    """32 hex digits over token ids as little-endian uint32."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=16).hexdigest()
