"""The life of a group that is parked and brought back: a pure state machine (docs/parking.md has the picture).

Owns which call may follow which, and what a failure means. Invariants: nothing is locked before the sessions are saved;
no rank is checkpointed before all are locked, restored before all were checked, unlocked before all are restored; a
group is called running or parked only when the driver says so of every rank; every state but those of rest has a
deadline, and every one can be left. An event of an earlier turn changes nothing. Time is an argument; calls are made by
whoever runs this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from .driver import INVALID_VALUE, Op, ProcessState

# A wrong map can be mended once; what fails again has another cause.
REFUSED_RESTORES_MAX = 2
UNLOCKS_MAX = 2


class ParkState(StrEnum):
    """Where a group is."""

    RUNNING = "running"
    PREFLIGHT = "preflight"
    QUIESCING = "quiescing"
    SAVING = "saving"
    LOCKING = "locking"  # its sessions are saved
    CHECKPOINTING = "checkpointing"  # all ranks are locked
    PARKED = "parked"
    CHECKING = "checking"
    RESTORING = "restoring"
    UNLOCKING = "unlocking"
    VALIDATING = "validating"
    RESUMING = "resuming"  # back without ever having been locked
    LOST = "lost"  # being killed
    GONE = "gone"


RESTING = (ParkState.RUNNING, ParkState.PARKED, ParkState.GONE)
_CALLING = {
    ParkState.LOCKING: Op.LOCK,
    ParkState.CHECKPOINTING: Op.CHECKPOINT,
    ParkState.RESTORING: Op.RESTORE,
    ParkState.UNLOCKING: Op.UNLOCK,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each state may take.

    `lock_s` is told to the driver, whose answer has `answer_s` to come back; `settle_s`: for a last look at the driver.
    """

    check_s: float = 20.0
    guest_s: float = 60.0
    lock_s: float = 10.0
    answer_s: float = 5.0
    copy_s: float = 300.0
    unlock_s: float = 15.0
    settle_s: float = 10.0
    kill_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of a group.

    `done`: ranks whose call of this turn was answered, and `bad`: one of them with an error that is harmless;
    `looking`: the driver is being asked. `refused` restores and `unlocks` are counted, for neither is tried for ever.
    """

    ranks: int
    state: ParkState = ParkState.RUNNING
    turn: int = 0
    done: frozenset[int] = frozenset()
    bad: bool = False
    looking: bool = False
    deadline_s: float | None = None
    refused: int = 0
    unlocks: int = 0
    text: str = ""


# What happens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParkAsked:
    """Somebody wants the group parked."""


@dataclass(frozen=True, slots=True)
class UnparkAsked:
    """Somebody wants it back."""


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody thought better of a park."""


@dataclass(frozen=True, slots=True)
class Went:
    """What this turn asked of the machine or the guest is done: the check passed, it is quiet, saved, awake, proven."""

    turn: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What this turn asked for is refused or failed; nothing was changed by it."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class Did:
    """A rank's call succeeded."""

    turn: int
    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's call came back with an error of the driver's."""

    turn: int
    rank: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class HelperLost:
    """A helper ended in the midst of a call: what came of it is not known."""

    turn: int
    rank: int


@dataclass(frozen=True, slots=True)
class States:
    """What the driver says of each rank; None where it says nothing."""

    turn: int
    of: tuple[ProcessState | None, ...]


@dataclass(frozen=True, slots=True)
class Died:
    """A rank is gone, or the whole worker."""

    text: str


@dataclass(frozen=True, slots=True)
class AllGone:
    """Nothing of the group is left."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ParkAsked | UnparkAsked | CancelAsked | Went | Refused | Did | Failed | HelperLost | States | Died | AllGone | Tick
)

# What is to be done -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellState:
    """The new state: to be written down before what follows is done."""

    state: ParkState
    text: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Look whether the group can be parked, or, `back`, restored."""

    turn: int
    back: bool


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Give it nothing new, and bring it to a step boundary."""

    turn: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save its sessions, or move them."""

    turn: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Have it go on; with `proof` only after it has shown that it is what it was."""

    turn: int
    proof: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Make this call for each of these ranks at once."""

    turn: int
    op: Op
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """End all helpers, and ask the driver with new ones until all ranks are in one of `goals`, or until `until_s`."""

    turn: int
    goals: frozenset[ProcessState]
    until_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """End the whole group; `AllGone` is awaited."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of it need be remembered."""


Action = TellState | Check | Quiesce | Save | Wake | Call | Look | Kill | Forget


def step(life: Life, event: Event, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    """The life after `event`, and what is to be done, in order."""
    match event:
        case ParkAsked():
            return _enter(life, ParkState.PREFLIGHT, now_s, limits) if life.state is ParkState.RUNNING else (life, ())
        case UnparkAsked():
            return _enter(life, ParkState.CHECKING, now_s, limits) if life.state is ParkState.PARKED else (life, ())
        case CancelAsked():
            return _cancelled(life, now_s, limits)
        case Went(turn):
            return _went(life, now_s, limits) if turn == life.turn else (life, ())
        case Refused(turn, text):
            return _refused(life, text, now_s, limits) if turn == life.turn else (life, ())
        case Did(turn, rank):
            return _did(life, rank, now_s, limits) if _is_calling(life, turn) else (life, ())
        case Failed(turn, rank, code, text):
            return _failed(life, rank, code, text, now_s, limits) if _is_calling(life, turn) else (life, ())
        case HelperLost(turn, rank):
            text = f"the helper of rank {rank} was lost in a call"
            return _look(life, text, now_s, limits) if _is_calling(life, turn) else (life, ())
        case States(turn, of):
            return _settled(life, of, now_s, limits) if life.looking and turn == life.turn else (life, ())
        case Died(text):
            return _died(life, text, now_s, limits)
        case AllGone():
            return _gone(life) if life.state is ParkState.LOST else (life, ())
        case Tick():
            return _tick(life, now_s, limits)
    assert_never(event)


def adopted(
    ranks: int, state: ParkState, refused: int, now_s: float, limits: Limits
) -> tuple[Life, tuple[Action, ...]]:
    """The life of a group whose keeper is gone, as its journal has it: the driver is asked before anything else."""
    # What its keeper asked for last may be under way still.
    limit_s = {ParkState.LOCKING: limits.lock_s, ParkState.UNLOCKING: limits.unlock_s}.get(state, limits.copy_s)
    life = Life(ranks, state, 1, deadline_s=now_s + limit_s, refused=refused)
    if state is ParkState.LOST:
        return _lost(life, "it was lost before", now_s, limits)
    if state in (ParkState.RUNNING, ParkState.GONE):
        return life, (Forget(),)
    return _look(life, "its keeper was lost", now_s, limits)


def _enter(
    life: Life, state: ParkState, now_s: float, limits: Limits, text: str = "", ranks: Sequence[int] | None = None
) -> tuple[Life, tuple[Action, ...]]:
    """The beginning of a state: its turn, its deadline, and what it is about."""
    turn = life.turn + 1
    of_all = tuple(range(life.ranks)) if ranks is None else tuple(ranks)
    skipped = frozenset(range(life.ranks)) - frozenset(of_all)
    limit_s: float | None
    work: tuple[Action, ...]
    match state:
        case ParkState.PREFLIGHT | ParkState.CHECKING:
            limit_s, work = limits.check_s, (Check(turn, back=state is ParkState.CHECKING),)
        case ParkState.QUIESCING:
            limit_s, work = limits.guest_s, (Quiesce(turn),)
        case ParkState.SAVING:
            limit_s, work = limits.guest_s, (Save(turn),)
        case ParkState.LOCKING:
            limit_s, work = limits.lock_s + limits.answer_s, (Call(turn, Op.LOCK, of_all),)
        case ParkState.CHECKPOINTING:
            limit_s, work = limits.copy_s, (Call(turn, Op.CHECKPOINT, of_all),)
        case ParkState.RESTORING:
            limit_s, work = limits.copy_s, (Call(turn, Op.RESTORE, of_all),)
        case ParkState.UNLOCKING:
            limit_s, work = limits.unlock_s, (Call(turn, Op.UNLOCK, of_all),)
        case ParkState.VALIDATING | ParkState.RESUMING:
            limit_s, work = limits.guest_s, (Wake(turn, proof=state is ParkState.VALIDATING),)
        case ParkState.LOST:
            limit_s, work = limits.kill_s, (Kill(),)
        case ParkState.RUNNING | ParkState.GONE:
            limit_s, work = None, (Forget(),)
        case ParkState.PARKED:
            limit_s, work = None, ()
        case _:
            assert_never(state)
    entered = Life(
        life.ranks,
        state,
        turn,
        done=skipped,
        deadline_s=None if limit_s is None else now_s + limit_s,
        refused=life.refused if state in (ParkState.PARKED, ParkState.CHECKING, ParkState.RESTORING) else 0,
        unlocks=life.unlocks + 1 if state is ParkState.UNLOCKING else 0,
        text=text,
    )
    return entered, (TellState(state, text), *work)


def _is_calling(life: Life, turn: int) -> bool:
    return turn == life.turn and life.state in _CALLING and not life.looking


def _went(life: Life, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    after = {
        ParkState.PREFLIGHT: ParkState.QUIESCING,
        ParkState.QUIESCING: ParkState.SAVING,
        ParkState.SAVING: ParkState.LOCKING,
        ParkState.CHECKING: ParkState.RESTORING,
        ParkState.VALIDATING: ParkState.RUNNING,
        ParkState.RESUMING: ParkState.RUNNING,
    }.get(life.state)
    if after is None or life.looking:
        return life, ()
    # Why it came back is said once more at the end: that is what whoever asked waits for.
    return _enter(life, after, now_s, limits, life.text if after is ParkState.RUNNING else "")


def _refused(life: Life, text: str, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    if life.looking:
        return life, ()
    match life.state:
        case ParkState.PREFLIGHT:
            return _enter(life, ParkState.RUNNING, now_s, limits, text)
        case ParkState.QUIESCING | ParkState.SAVING:
            return _enter(life, ParkState.RESUMING, now_s, limits, text)
        case ParkState.CHECKING:
            return _enter(life, ParkState.PARKED, now_s, limits, text)
        case ParkState.VALIDATING | ParkState.RESUMING:
            return _lost(life, text, now_s, limits)
    return life, ()


def _did(life: Life, rank: int, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    life = replace(life, done=life.done | {rank})
    if len(life.done) < life.ranks:
        return life, ()
    if life.bad:
        return _look(life, life.text, now_s, limits)
    after = {
        ParkState.LOCKING: ParkState.CHECKPOINTING,
        ParkState.CHECKPOINTING: ParkState.PARKED,
        ParkState.RESTORING: ParkState.UNLOCKING,
        ParkState.UNLOCKING: ParkState.VALIDATING,
    }[life.state]
    return _enter(life, after, now_s, limits, life.text if life.state is ParkState.UNLOCKING else "")


def _failed(
    life: Life, rank: int, code: str, text: str, now_s: float, limits: Limits
) -> tuple[Life, tuple[Action, ...]]:
    if life.state is ParkState.LOCKING or (life.state is ParkState.RESTORING and code == INVALID_VALUE):
        # The others' calls are waited for: one that is under way could change its rank after the look.
        return _did(replace(life, bad=True, text=text), rank, now_s, limits)
    return _lost(life, text, now_s, limits)


def _cancelled(life: Life, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    text = "the park was cancelled"
    match life.state:
        case ParkState.PREFLIGHT:
            return _enter(life, ParkState.RUNNING, now_s, limits, text)
        case ParkState.QUIESCING | ParkState.SAVING if not life.looking:
            return _enter(life, ParkState.RESUMING, now_s, limits, text)
        case ParkState.LOCKING if not life.looking:
            # The driver ends its own wait soon; a helper that is killed in it would leave more to find out.
            return replace(life, bad=True, text=text), ()
    return life, ()


def _look(life: Life, text: str, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    """Ask the driver what came of a call, which may be under way still, for as long as it had."""
    goals = {
        ParkState.CHECKPOINTING: {ProcessState.CHECKPOINTED},
        ParkState.RESTORING: {ProcessState.LOCKED, ProcessState.RUNNING},
        ParkState.UNLOCKING: {ProcessState.RUNNING},
    }.get(life.state, set())
    is_over = life.state not in _CALLING or len(life.done) == life.ranks
    until_s = now_s if is_over else max(life.deadline_s or 0.0, now_s + limits.settle_s)
    # New helpers have to come up first, and the last answers to come back.
    deadline_s = until_s + limits.settle_s + limits.check_s
    looking = replace(life, turn=life.turn + 1, looking=True, deadline_s=deadline_s, text=text)
    return looking, (Look(looking.turn, frozenset(goals), until_s),)


def _settled(
    life: Life, of: tuple[ProcessState | None, ...], now_s: float, limits: Limits
) -> tuple[Life, tuple[Action, ...]]:
    """What the driver says is where the group is; what cannot be said of all ranks together is lost."""
    text, found = life.text, set(of)
    locked = tuple(rank for rank, state in enumerate(of) if state is ProcessState.LOCKED)
    was = life.state
    life = replace(life, looking=False)
    if found == {ProcessState.CHECKPOINTED}:
        if was is ParkState.RESTORING:
            life = replace(life, refused=life.refused + 1)
            if life.refused >= REFUSED_RESTORES_MAX:
                return _lost(life, text, now_s, limits)
        if was in (ParkState.CHECKPOINTING, ParkState.PARKED, ParkState.CHECKING, ParkState.RESTORING):
            return _enter(life, ParkState.PARKED, now_s, limits, text)
    elif found == {ProcessState.RUNNING}:
        if was is ParkState.PREFLIGHT:
            return _enter(life, ParkState.RUNNING, now_s, limits, text)
        early = (ParkState.QUIESCING, ParkState.SAVING, ParkState.RESUMING, ParkState.LOCKING)
        after = ParkState.RESUMING if was in early else ParkState.VALIDATING
        return _enter(life, after, now_s, limits, text)
    elif found <= {ProcessState.RUNNING, ProcessState.LOCKED}:
        partly = found != {ProcessState.LOCKED}
        # Of a group that came from the host, or was to go there, all have gone the same way, or it is torn.
        torn = partly and was in (ParkState.CHECKPOINTING, ParkState.PARKED, ParkState.CHECKING, ParkState.RESTORING)
        if not torn and life.unlocks < UNLOCKS_MAX:
            return _enter(life, ParkState.UNLOCKING, now_s, limits, text, ranks=locked)
    said = ", ".join("nothing" if state is None else state.value for state in of)
    return _lost(life, f"{text}; the driver says: {said}", now_s, limits)


def _lost(life: Life, text: str, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    return _enter(life, ParkState.LOST, now_s, limits, text)


def _died(life: Life, text: str, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    if life.state in (ParkState.LOST, ParkState.GONE):
        return life, ()
    if life.state is ParkState.RUNNING:
        return _gone(replace(life, text=text))
    return _lost(life, text, now_s, limits)


def _gone(life: Life, text: str = "") -> tuple[Life, tuple[Action, ...]]:
    text = text or life.text
    gone = Life(life.ranks, ParkState.GONE, life.turn + 1, text=text)
    return gone, (TellState(ParkState.GONE, text), Forget())


def _tick(life: Life, now_s: float, limits: Limits) -> tuple[Life, tuple[Action, ...]]:
    if life.deadline_s is None or now_s < life.deadline_s:
        return life, ()
    text = f"{life.state.value} took longer than it may"
    if life.looking:
        return _lost(life, f"{life.text}; the driver does not say what came of it", now_s, limits)
    if life.state is ParkState.LOST:
        return _gone(life, f"{life.text}; it could not be killed (stuck in a driver?) and is left behind")
    if life.state in _CALLING:
        return _look(life, text, now_s, limits)
    return _refused(life, text, now_s, limits)
