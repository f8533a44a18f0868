"""The life of a session: a pure state machine.

    admitted ─> running ─> (interrupted ─> restoring ─> running)* ─> finished | refused | failed | cancelled

Owns the order of owners. Invariants: the generation grows by one with each placement; at any time at most one
(worker, epoch, generation) owns the session; nothing happens after the end. Time and names are arguments.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from .ids import SessionId


class SessionState(StrEnum):
    """Where a session is in its life."""

    ADMITTED = "admitted"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    RESTORING = "restoring"
    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({SessionState.FINISHED, SessionState.REFUSED, SessionState.FAILED, SessionState.CANCELLED})


class WrongTransition(Exception):
    """An event that cannot happen in this state: a defect of the caller, never of an engine or client."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may write a session's tokens."""

    worker: str
    epoch: int
    generation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """One failover: why, how it ended, and the figures that were measured."""

    reason: str
    outcome: str = ""
    tier: str = ""
    worker: str = ""
    cut: int = 0
    lag: int = 0
    kv_tokens_loaded: int = 0
    tokens_recomputed: int = 0
    gap_ms: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tracker:
    """One session."""

    session: SessionId
    state: SessionState = SessionState.ADMITTED
    owner: Owner | None = None
    failovers: tuple[Failed, ...] = field(default=())

    @classmethod
    def after(cls, session: SessionId, generation: int) -> "Tracker":
        """A session that had owners before any of these here; the next one's generation follows theirs."""
        return cls(session, owner=Owner("", 0, generation) if generation else None)

    @property
    def generation(self) -> int:
        """Of the current owner; 0 before the first."""
        return 0 if self.owner is None else self.owner.generation

    def placed(self, worker: str, epoch: int) -> "Tracker":
        """A worker becomes the owner: the first, or the next after an interruption."""
        self._require(SessionState.ADMITTED, SessionState.INTERRUPTED)
        state = SessionState.RUNNING if self.state is SessionState.ADMITTED else SessionState.RESTORING
        return replace(self, state=state, owner=Owner(worker, epoch, self.generation + 1))

    def interrupted(self, reason: str) -> "Tracker":
        """The owner has lost the session; also while it was still restoring it."""
        self._require(SessionState.RUNNING, SessionState.RESTORING)
        failovers = self.failovers
        if self.state is SessionState.RESTORING and failovers:
            failovers = (*failovers[:-1], replace(failovers[-1], outcome="interrupted"))
        return replace(self, state=SessionState.INTERRUPTED, failovers=(*failovers, Failed(reason)))

    def resumed(self, outcome: Failed) -> "Tracker":
        """The new owner has written something that the client did not have."""
        self._require(SessionState.RESTORING)
        reason = self.failovers[-1].reason
        return replace(
            self,
            state=SessionState.RUNNING,
            failovers=(*self.failovers[:-1], replace(outcome, reason=reason)),
        )

    def ended(self, state: SessionState) -> "Tracker":
        """The session is over."""
        if state not in ENDED:
            raise WrongTransition(f"session {self.session}: {state} is no ending")
        if self.state in ENDED:
            raise WrongTransition(f"session {self.session}: ended twice ({self.state}, {state})")
        failovers = self.failovers
        if state is SessionState.REFUSED and failovers and not failovers[-1].outcome:
            failovers = (*failovers[:-1], replace(failovers[-1], outcome=state.value))
        return replace(self, state=state, failovers=failovers)

    def _require(self, *states: SessionState) -> None:
        if self.state not in states:
            raise WrongTransition(f"session {self.session}: {self.state}, expected {' or '.join(states)}")
