"""What the decode loop works on: jobs, sessions, and what it needs of a model and a sampler. No behaviour.

A `Job` is what a request asks for; a `Session` is a job in the engine, changed by the decode thread alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ...session.arena import LoadState
from ...session.marker import Marker, Resume
from .extents import Run
from .outbox import Outbox
from .output import Output, TokenLogprobs
from .protocol import SamplingParams
from .recording import Record

LOAD_TIMEOUT_S = 10.0


class Runner(Protocol):
    """The model, over a pool."""

    def cache(self, run: Run) -> Any:
        """What `forward` keeps a session's keys and values in; the content of the run stays."""
        ...

    def forward(self, ids: Sequence[int], start: int, cache: Any) -> Any:
        """Compute positions [start, start + len(ids)); the logits of the last one."""
        ...


class SamplerLike(Protocol):
    """What chooses a session's tokens (sampling.py)."""

    def observe(self, token: int) -> None:
        """Count an output token."""
        ...

    def sample(self, raw: Any, index: int) -> tuple[int, TokenLogprobs | None]:
        """Choose output token number `index`."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the engine needs it: token ids, parameters, and where it goes on."""

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine. `can_load`: others can write to its pool, so KV may be waited for."""

    block_tokens: int = 16
    sessions_max: int = 16
    waiting_max: int = 64
    load_timeout_s: float = LOAD_TIMEOUT_S
    can_load: bool = True


class Phase(StrEnum):
    """Where a session is in the engine."""

    QUEUED = "queued"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Session:
    """One job in the engine. The decode thread alone changes it, but for `closed`."""

    job: Job
    outbox: Outbox
    output: Output
    sampler: SamplerLike
    ids: list[int]
    phase: Phase = Phase.QUEUED
    closed: bool = False
    begun: bool = False
    cold: bool = False
    # Where its KV was to be copied from is another's now.
    source_lost: bool = False
    run: Run | None = None
    cache: Any = None
    record: Record = field(default_factory=lambda: Record(None, None))
    kv_len: int = 0
    load: LoadState = LoadState.NONE
    loaded: int = 0
    resumed_len: int = 0
    load_until_s: float = 0.0

    @property
    def resume(self) -> Resume | None:
        """Where the session goes on, if it does."""
        return self.job.marker.resume if self.job.marker is not None else None
