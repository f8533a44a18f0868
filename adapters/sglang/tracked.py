"""A session as the scheduler side knows it: a marked request, its place in the arena, and how its KV comes back.

Owns the few facts about a request that are read off SGLang's objects in more than one place. Pure but for that.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from ...session.arena_writer import SlotWriter
from ...session.ids import SessionId
from ...session.marker import KvSource, Marker


class Phase(Enum):
    """How far a request's way back in has come."""

    NEW = auto()
    AWAITED = auto()
    LOADED = auto()
    WITHOUT_KV = auto()


@dataclass(slots=True)
class Tracked:
    """A marked request; `journaled` of its outputs are in the arena, and `pages` in its table."""

    request: Any
    marker: Marker
    slot: SlotWriter
    phase: Phase
    journaled: int
    pages: list[int] = field(default_factory=list)
    told: bool = False

    @property
    def session(self) -> SessionId:
        return self.marker.session

    @property
    def kv_source(self) -> KvSource:
        """Where its KV is offered; NONE for a new session."""
        return KvSource.NONE if self.marker.resume is None else self.marker.resume.kv


def complete_positions(request: Any) -> int:
    """How many positions have KV once its newest output is there, which has none yet."""
    return int(request.seqlen) - 1


def has_more_than_tokens(request: Any) -> bool:
    """Whether its KV depends on what no prompt hash tells: images, embeddings, adapters, an engine's own sessions."""
    parts = ("multimodal_inputs", "input_embeds", "positional_embed_overrides", "token_type_ids", "session", "lora_id")
    return any(getattr(request, name, None) is not None for name in parts)


def is_reproducible(request: Any, *, deterministic: bool) -> bool:
    """Whether the tokens that follow depend on nothing but what is rebuilt; else it would be another run."""
    return deterministic or request.sampling_params.top_k <= 1
