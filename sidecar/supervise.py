"""The life of an engine that midstream starts itself: a pure state machine.

    stopped ─> starting ─> ready ─> draining ─> stopped
                  │          │          │
                  └────────> dead <─────┘            dead: something of the tree died; what is left is being killed
                           ↙      ↘
                  restarting      failed             restarting: waiting for its turn; failed: budget used up
                      │
                      └─> starting (next epoch)

Owns when an engine is started again and when it is given up. Invariant: an epoch is started only after nothing of the
one before is left, and an event of an older epoch changes nothing. Time is an argument; processes are
`supervise_run.py`.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

BACKOFF_MAX_S = 60.0
# A command that has never worked is most likely wrong: trying it for long only hides that.
RESTARTS_BEFORE_READY_MAX = 1


class WorkerState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"  # of engines that others start: nobody is at its address, and none has begun to load


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a life (settings `supervise.*`)."""

    start_timeout_s: float = 900.0
    stop_timeout_s: float = 30.0
    restart_backoff_s: float = 1.0
    restarts_max: int = 5
    restarts_window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of one engine.

    `restarts` are the times of those in the window; `deadline_s` is when the next `Tick` matters.
    """

    state: WorkerState = WorkerState.STOPPED
    epoch: int = 0
    is_wanted: bool = False
    restarts: tuple[float, ...] = ()
    deadline_s: float | None = None
    was_ready: bool = False


# What happens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAsked:
    """Somebody wants the engine to run."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the engine to end, and not to come back."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Nothing new shall go to the engine; what it has may end."""


@dataclass(frozen=True, slots=True)
class BecameHealthy:
    """The engine answered its health check for the first time."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Died:
    """Something without which the engine is no engine is gone."""

    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of the epoch's processes is left."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = StartAsked | StopAsked | DrainAsked | BecameHealthy | Died | Gone | Tick

# What is to be done -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the engine's processes as this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KillTree:
    """End all processes of the epoch, gently for `grace_s`; `Gone` is awaited."""

    epoch: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class TellDeath:
    """Say at once that the epoch is dead: sessions are waiting to go on elsewhere."""

    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class TellState:
    """Say the new state; `text` is what a person should know of it."""

    state: WorkerState
    text: str = ""


Action = Spawn | KillTree | TellDeath | TellState


def step(life: Life, event: Event, now_s: float, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    """The life after `event`, and what is to be done, in order."""
    match event:
        case StartAsked():
            return _start_asked(life, now_s, policy)
        case StopAsked():
            return _stop_asked(life, policy)
        case DrainAsked():
            if life.state is not WorkerState.READY:
                return life, ()
            return _to(life, WorkerState.DRAINING)
        case BecameHealthy(epoch):
            if epoch != life.epoch or life.state is not WorkerState.STARTING:
                return life, ()
            return _to(replace(life, was_ready=True), WorkerState.READY)
        case Died(epoch, text):
            if epoch != life.epoch or not _is_running(life):
                return life, ()
            return _died(life, text)
        case Gone(epoch):
            if epoch != life.epoch:
                return life, ()
            return _gone(life, now_s, policy)
        case Tick():
            return _tick(life, now_s, policy)
    assert_never(event)


def backoff_s(restart_index: int, policy: Policy) -> float:
    """The wait before a restart; the first in a window is at once, for its sessions are waiting."""
    if restart_index == 0:
        return 0.0
    # The exponent is bounded so that a huge budget cannot overflow a float.
    return float(min(policy.restart_backoff_s * 2 ** min(restart_index - 1, 20), BACKOFF_MAX_S))


def _is_running(life: Life) -> bool:
    return life.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)


def _to(life: Life, state: WorkerState, text: str = "") -> tuple[Life, tuple[Action, ...]]:
    return replace(life, state=state, deadline_s=None), (TellState(state, text),)


def _spawn(life: Life, now_s: float, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    epoch = life.epoch + 1
    starting = replace(life, state=WorkerState.STARTING, epoch=epoch, deadline_s=now_s + policy.start_timeout_s)
    return starting, (TellState(WorkerState.STARTING), Spawn(epoch))


def _start_asked(life: Life, now_s: float, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    wanted = replace(life, is_wanted=True)
    if life.state in (WorkerState.STOPPED, WorkerState.FAILED):
        # A person who starts a failed worker again gives it a new budget.
        return _spawn(replace(wanted, restarts=()), now_s, policy)
    return wanted, ()


def _stop_asked(life: Life, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    unwanted = replace(life, is_wanted=False)
    if life.state in (WorkerState.RESTARTING, WorkerState.FAILED):
        return _to(unwanted, WorkerState.STOPPED)
    if not _is_running(life) or (life.state is WorkerState.DRAINING and not life.is_wanted):
        return unwanted, ()  # stopped, or on its way
    draining = replace(unwanted, state=WorkerState.DRAINING, deadline_s=None)
    return draining, (TellState(WorkerState.DRAINING), KillTree(life.epoch, policy.stop_timeout_s))


def _died(life: Life, text: str) -> tuple[Life, tuple[Action, ...]]:
    if life.state is WorkerState.DRAINING and not life.is_wanted:
        return life, ()  # it was told to end; Gone follows
    dead = replace(life, state=WorkerState.DEAD, deadline_s=None)
    return dead, (
        TellDeath(life.epoch, text),
        TellState(WorkerState.DEAD, text),
        KillTree(life.epoch, 0.0),
    )


def _gone(life: Life, now_s: float, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    if life.state not in (WorkerState.DEAD, WorkerState.DRAINING):
        return life, ()
    if not life.is_wanted:
        return _to(life, WorkerState.STOPPED)
    recent = tuple(t for t in life.restarts if now_s - t < policy.restarts_window_s)
    restarts_max = policy.restarts_max
    if not life.was_ready:
        restarts_max = min(restarts_max, RESTARTS_BEFORE_READY_MAX)
    if len(recent) >= restarts_max:
        fact = (
            f"{len(recent)} restarts in {policy.restarts_window_s:g} s did not help"
            if life.was_ready
            else f"it was never ready in {len(recent) + 1} starts"
        )
        text = (
            f"{fact}; mend what the engine's last lines say, then start it again "
            "(supervise.restarts_max limits the restarts of an engine that was ready)"
        )
        return _to(replace(life, restarts=recent), WorkerState.FAILED, text)
    wait_s = backoff_s(len(recent), policy)
    waiting = replace(life, state=WorkerState.RESTARTING, restarts=(*recent, now_s), deadline_s=now_s + wait_s)
    text = f"restart {len(recent) + 1} of {restarts_max} in {wait_s:g} s"
    return waiting, (TellState(WorkerState.RESTARTING, text),)


def _tick(life: Life, now_s: float, policy: Policy) -> tuple[Life, tuple[Action, ...]]:
    if life.deadline_s is None or now_s < life.deadline_s:
        return life, ()
    if life.state is WorkerState.RESTARTING:
        return _spawn(life, now_s, policy)
    text = (
        f"did not answer its health check within {policy.start_timeout_s:g} s; "
        "look at its last lines, or raise supervise.start_timeout_s"
    )
    return _died(life, text)
