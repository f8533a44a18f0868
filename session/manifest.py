"""A stored snapshot: whose KV, up to which position, in which chunks.

Owns the manifest's canonical bytes (docs/formats.md). Invariant: one manifest has one encoding, it carries its own
checksum, and its parts agree with each other (positions, outputs and chunk count). Pure; where it lies is the store's
business.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import CorruptError
from .ids import SessionId, session_id

MANIFEST_VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20
_MAGIC = b"midstream-manifest "
_DIGEST_HEX = 64
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot. KV of the positions [0, kv_len) is in `chunks`, one a block; the last one may be partly filled.

    `outputs` are the ids with which the session goes on: all whose predecessor has KV, so
    `kv_len == prompt_len + len(outputs) - 1`. `key` is the compatibility key, `fingerprint`
    (32 hex digits) that of the pool layout. Of an engine with several `ranks` a chunk has the parts of a block of all
    of them, as of the `step` up to which all had committed. `recomputed`: some of the KV was not decoded, but computed
    again from outputs that were told, so that what goes on from it may differ from the run that was interrupted.
    """

    session: SessionId
    generation: int
    key: Mapping[str, Any]
    fingerprint: str
    block_tokens: int
    block_bytes: int
    prompt_len: int
    prompt_hash: str
    kv_len: int
    outputs: tuple[int, ...]
    chunks: tuple[str, ...]
    created_at: float
    ranks: int = 1
    step: int = 0
    recomputed: bool = False

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or not self.outputs or self.kv_len != self.prompt_len + len(self.outputs) - 1:
            raise ValueError(
                f"{self.kv_len} positions do not follow from {self.prompt_len} prompt tokens and "
                f"{len(self.outputs)} outputs"
            )
        if self.block_tokens < 1 or len(self.chunks) != -(-self.kv_len // self.block_tokens):
            raise ValueError(
                f"{len(self.chunks)} chunks of {self.block_tokens} tokens are not what {self.kv_len} positions need"
            )
        if self.ranks < 1 or (self.ranks == 1 and self.step):
            raise ValueError(f"{self.ranks} ranks have no step {self.step} in common")


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest: one line with its checksum, one line of JSON."""
    body = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    if manifest.ranks == 1:
        # As it was before there were ranks: whoever knows none can read it.
        del body["ranks"], body["step"]
    if not manifest.recomputed:
        del body["recomputed"]
    body |= {"v": MANIFEST_VERSION, "key": dict(manifest.key)}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return _MAGIC + hashlib.blake2b(text, digest_size=_DIGEST_HEX // 2).hexdigest().encode() + b"\n" + text + b"\n"


def decode(stored: bytes) -> Manifest:
    """Read a manifest; CorruptError for anything but exactly what `encode` made."""
    head, newline, rest = stored.partition(b"\n")
    if not newline or not head.startswith(_MAGIC) or len(head) != len(_MAGIC) + _DIGEST_HEX or rest[-1:] != b"\n":
        raise CorruptError(
            "manifest: cut off or not one of midstream's; an older snapshot or the journal is used instead"
        )
    text = rest[:-1]
    if hashlib.blake2b(text, digest_size=_DIGEST_HEX // 2).hexdigest().encode() != head[len(_MAGIC) :]:
        raise CorruptError("manifest: checksum differs; an older snapshot or the journal is used instead")
    try:
        body = json.loads(text)
        if body.pop("v") != MANIFEST_VERSION:
            raise CorruptError(f"manifest: not of version {MANIFEST_VERSION}; read it with the midstream that wrote it")
        _check_kinds(body)
        _check_ranks(body)
        if body.get("recomputed", True) is not True:
            raise ValueError(f"recomputed is {body['recomputed']!r:.40}")
        body |= {"session": session_id(body["session"]), "outputs": tuple(body["outputs"])}
        return Manifest(**body | {"chunks": tuple(body["chunks"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(f"manifest: {error}; it was not written by this midstream") from error


def _check_kinds(body: dict[str, Any]) -> None:
    """A right checksum proves that somebody wrote it so, not that it was midstream."""
    for name in ("generation", "block_tokens", "block_bytes", "prompt_len", "kv_len"):
        if not _whole(body[name]):
            raise ValueError(f"{name} is {body[name]!r:.40}")
    if not isinstance(body["created_at"], float | int) or not isinstance(body["key"], dict):
        raise ValueError("created_at must be a number and key an object")
    if not all(isinstance(body[name], str) and _HEX.fullmatch(body[name]) for name in ("fingerprint", "prompt_hash")):
        raise ValueError("fingerprint and prompt_hash must be 32 hex digits")
    if not all(_whole(token) for token in body["outputs"]):
        raise ValueError("outputs must be token ids")
    if not all(isinstance(name, str) and _HEX.fullmatch(name) for name in body["chunks"]):
        raise ValueError("chunks must be names of 32 hex digits")


def _check_ranks(body: dict[str, Any]) -> None:
    """Either is there with the other alone; one rank has no step to agree on."""
    if "ranks" not in body and "step" not in body:
        return
    if not _whole(body["ranks"]) or body["ranks"] < 2 or not _whole(body["step"]):
        raise ValueError(f"ranks is {body['ranks']!r:.40} and step {body['step']!r:.40}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
