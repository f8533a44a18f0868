"""The states of a parked group, against a driver that does what it likes: nothing is ever called what it is not."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.adapters.cuda_checkpoint.driver import Op, ProcessState
from midstream.adapters.cuda_checkpoint.machine import (
    RESTING,
    Action,
    AllGone,
    Call,
    CancelAsked,
    Check,
    Did,
    Died,
    Event,
    Failed,
    Forget,
    HelperLost,
    Kill,
    Life,
    Limits,
    Look,
    ParkAsked,
    ParkState,
    Quiesce,
    Refused,
    Save,
    States,
    TellState,
    Tick,
    UnparkAsked,
    Wake,
    Went,
    adopted,
    step,
)

LIMITS = Limits()
RUNNING, LOCKED, CHECKPOINTED, FAILED = ProcessState
LEADS = {Op.LOCK: LOCKED, Op.CHECKPOINT: CHECKPOINTED, Op.RESTORE: LOCKED, Op.UNLOCK: RUNNING}
NEEDS = {Op.LOCK: RUNNING, Op.CHECKPOINT: LOCKED, Op.RESTORE: CHECKPOINTED, Op.UNLOCK: LOCKED}


class World:
    """A driver, a guest and a clock; what happens next is drawn. `true`: the states as the driver has them."""

    def __init__(self, ranks: int, draw: st.DataObject) -> None:
        self.draw = draw
        self.now_s = 0.0
        self.life = Life(ranks)
        self.true: list[ProcessState | None] = [RUNNING] * ranks
        self.journal: ParkState | None = None
        # What was asked for and not answered: work of the machine's, or (op, rank) under way at the driver.
        self.work: Action | None = None
        self.calls: dict[int, tuple[int, Op]] = {}
        self.is_saved = False
        self.was_checked = False
        self.is_proven = True
        self.history: list[ParkState] = []

    def happened(self, event: Event) -> None:
        self.life, actions = step(self.life, event, self.now_s, LIMITS)
        self.perform(actions)

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TellState(state):
                    self.told(state)
                case Forget():
                    self.journal = None
                case Call(turn, op, ranks):
                    self.called(turn, op, ranks)
                case Kill() | Check() | Quiesce() | Save() | Wake() | Look():
                    self.work = action

    def told(self, state: ParkState) -> None:
        self.history.append(state)
        self.journal, self.work = state, None
        if state is ParkState.RUNNING:
            assert set(self.true) == {RUNNING}, self.history
            assert self.is_proven, "it takes part without proof"
        if state is ParkState.PARKED:
            assert set(self.true) == {CHECKPOINTED}, self.history
        if state is ParkState.PREFLIGHT:
            self.is_saved = self.was_checked = False
        if state is ParkState.CHECKING:
            self.was_checked = False

    def called(self, turn: int, op: Op, ranks: Sequence[int]) -> None:
        assert ranks
        for rank in ranks:
            # The guest is saved before anything is locked, and memory looked at before each restore.
            assert op is not Op.LOCK or self.is_saved
            assert op is not Op.RESTORE or self.was_checked
            # As a whole: nobody is checkpointed while one of the group runs, nor unlocked while one is not back.
            assert op is not Op.CHECKPOINT or set(self.true) == {LOCKED}
            assert op is not Op.UNLOCK or set(self.true) <= {LOCKED, RUNNING}
            self.calls[rank] = turn, op
        if op is Op.CHECKPOINT:
            # From here on its memory has been elsewhere.
            self.is_proven = False

    def one(self, *choices: str) -> str:
        return self.draw.draw(st.sampled_from(choices))

    def go(self) -> None:
        """Something happens."""
        self.now_s += self.draw.draw(st.sampled_from((0.0, 0.01, 1.0, 400.0)))
        match self.one("work", "work", "work", "tick", "asked", "died", "killed", "call", "call"):
            case "tick":
                self.happened(Tick())
            case "asked":
                self.happened(self.draw.draw(st.sampled_from((ParkAsked(), UnparkAsked(), CancelAsked()))))
            case "died" if self.one("yes", *["no"] * 9) == "yes":
                self.true[self.draw.draw(st.integers(0, len(self.true) - 1))] = None
                self.happened(Died("it has ended"))
            case "killed" if self.one("yes", *["no"] * 4) == "yes":
                self.keeper_is_killed()
            case "work":
                self.work_is_done(is_well=self.one("yes", "yes", "yes", "no") == "yes")
            case "call" if self.calls:
                self.call_ends(self.draw.draw(st.sampled_from(sorted(self.calls))))

    def work_is_done(self, *, is_well: bool) -> None:
        action, self.work = self.work, None
        match action:
            case Kill():
                self.true = [None] * len(self.true)
                self.happened(AllGone())
            case Look(turn, goals, until_s):
                if not any(set(self.true) == {goal} for goal in goals):
                    # What is under way at the driver comes to its end, one way or the other, before it is believed.
                    self.now_s = max(self.now_s, until_s)
                    for rank in sorted(self.calls):
                        self.at_driver(rank)
                self.calls.clear()
                self.happened(States(turn, tuple(self.true)))
            case Check(turn, back):
                self.was_checked |= is_well and back
                self.happened(Went(turn) if is_well else Refused(turn, "no"))
            case Save(turn):
                self.is_saved |= is_well
                self.happened(Went(turn) if is_well else Refused(turn, "no"))
            case Wake(turn, proof):
                self.is_proven |= is_well and proof
                self.happened(Went(turn) if is_well else Refused(turn, "no"))
            case Quiesce(turn):
                self.happened(Went(turn) if is_well else Refused(turn, "no"))

    def at_driver(self, rank: int) -> str:
        """A call at the driver comes to its end; its code, empty for success."""
        _, op = self.calls.pop(rank)
        if self.true[rank] is not NEEDS[op]:
            return "ILLEGAL_STATE"
        match self.one("well", "well", "well", "well", "harmless", "bad"):
            case "well":
                self.true[rank] = LEADS[op]
                return ""
            case "harmless" if op in (Op.LOCK, Op.RESTORE):
                return "NOT_READY" if op is Op.LOCK else "INVALID_VALUE"
            case "bad" if op is not Op.LOCK:
                self.true[rank] = FAILED
                return "UNKNOWN"
        return "NOT_READY" if op is Op.LOCK else "UNKNOWN"

    def call_ends(self, rank: int) -> None:
        turn, _ = self.calls[rank]
        if self.one("answered", "answered", "answered", "lost") == "lost":
            # The driver may go on with it: that is found out when it is looked for.
            self.happened(HelperLost(turn, rank))
            return
        code = self.at_driver(rank)
        self.happened(Failed(turn, rank, code, code) if code else Did(turn, rank))

    def keeper_is_killed(self) -> None:
        if self.journal is None:
            return
        for rank in sorted(self.calls):
            self.at_driver(rank)
        if self.journal is ParkState.LOCKING or self.one("unlocked", "killed too") == "unlocked":
            self.true = [RUNNING if s is LOCKED and self.one("y", "n") == "y" else s for s in self.true]
        self.work = None
        self.life, actions = adopted(len(self.true), self.journal, self.life.refused, self.now_s, LIMITS)
        self.perform(actions)
        if None in self.true:
            self.happened(Died("it has ended"))

    def comes_to_rest(self) -> None:
        """With nothing but time, and answers or none, it comes to rest; never past its deadlines."""
        deadline_s = self.now_s + 2000
        for _ in range(60):
            if self.life.state in RESTING and not self.life.looking:
                return
            assert self.life.deadline_s is not None, "a state without an end"
            if isinstance(self.work, Look | Kill) and self.one("yes", "no") == "yes":
                self.work_is_done(is_well=True)
            self.now_s = max(self.now_s, self.life.deadline_s or 0.0)
            self.happened(Tick())
        assert self.life.state in RESTING
        assert self.now_s < deadline_s


@settings(max_examples=200)
@given(st.integers(1, 3), st.integers(0, 60), st.data())
def test_whatever_happens_a_group_is_what_it_is_called_and_comes_to_rest(
    ranks: int, steps: int, data: st.DataObject
) -> None:
    world = World(ranks, data)
    world.happened(ParkAsked())
    for _ in range(steps):
        world.go()
    world.comes_to_rest()


def went(life: Life, *events: Event) -> tuple[Life, list[Action]]:
    actions: list[Action] = []
    for event in events:
        life, more = step(life, event, 0.0, LIMITS)
        actions += more
    return life, actions


def parked(ranks: int = 1) -> Life:
    life, _ = went(Life(ranks), ParkAsked(), Went(1), Went(2), Went(3))
    for turn in (4, 5):
        life, _ = went(life, *(Did(turn, rank) for rank in range(ranks)))
    assert life.state is ParkState.PARKED
    return life


def test_the_way_there_and_back_in_one_order() -> None:
    life, actions = went(parked(2), UnparkAsked(), Went(7), Did(8, 0), Did(8, 1), Did(9, 1), Did(9, 0), Went(10))
    assert life.state is ParkState.RUNNING
    assert [a.state.value for a in actions if isinstance(a, TellState)] == [
        "checking", "restoring", "unlocking", "validating", "running",
    ]  # fmt: skip
    assert actions[-1] == Forget()


def test_an_answer_of_an_earlier_turn_changes_nothing() -> None:
    life, _ = went(Life(1), ParkAsked(), Went(1), Went(2), Went(3))
    assert went(life, Did(3, 0), Went(3), Failed(2, 0, "X", ""), HelperLost(1, 0), States(4, (RUNNING,))) == (life, [])


def test_a_restore_that_is_refused_twice_without_harm_is_the_last_but_one() -> None:
    life = parked()
    for turn, state in ((6, ParkState.PARKED), (10, ParkState.LOST)):
        life, _ = went(life, UnparkAsked(), Went(turn + 1), Failed(turn + 2, 0, "INVALID_VALUE", "the map"))
        assert life.looking
        life, _ = went(life, States(turn + 3, (CHECKPOINTED,)))
        assert life.state is state


@pytest.mark.parametrize("code", ["OUT_OF_MEMORY", "NOT_SUPPORTED", "OPERATING_SYSTEM"])
def test_any_other_error_of_a_restore_is_the_end(code: str) -> None:
    life, actions = went(parked(), UnparkAsked(), Went(7), Failed(8, 0, code, code))
    assert life.state is ParkState.LOST
    assert Kill() in actions


@pytest.mark.parametrize(
    ("state", "of", "after"),
    [
        (ParkState.PREFLIGHT, (RUNNING,), ParkState.RUNNING),
        (ParkState.SAVING, (RUNNING,), ParkState.RESUMING),
        (ParkState.LOCKING, (LOCKED,), ParkState.UNLOCKING),
        (ParkState.LOCKING, (RUNNING, LOCKED), ParkState.UNLOCKING),
        (ParkState.CHECKPOINTING, (LOCKED,), ParkState.UNLOCKING),
        (ParkState.CHECKPOINTING, (CHECKPOINTED,), ParkState.PARKED),
        (ParkState.CHECKPOINTING, (CHECKPOINTED, LOCKED), ParkState.LOST),
        (ParkState.CHECKPOINTING, (RUNNING, LOCKED), ParkState.LOST),
        (ParkState.PARKED, (CHECKPOINTED,), ParkState.PARKED),
        (ParkState.PARKED, (RUNNING,), ParkState.VALIDATING),
        (ParkState.RESTORING, (CHECKPOINTED,), ParkState.PARKED),
        (ParkState.RESTORING, (LOCKED, LOCKED), ParkState.UNLOCKING),
        (ParkState.RESTORING, (LOCKED, CHECKPOINTED), ParkState.LOST),
        (ParkState.UNLOCKING, (LOCKED, RUNNING), ParkState.UNLOCKING),
        (ParkState.VALIDATING, (RUNNING,), ParkState.VALIDATING),
        (ParkState.RESTORING, (FAILED,), ParkState.LOST),
        (ParkState.PARKED, (None,), ParkState.LOST),
    ],
)
def test_what_a_new_keeper_makes_of_what_it_finds(
    state: ParkState, of: tuple[ProcessState | None, ...], after: ParkState
) -> None:
    life, [look] = adopted(len(of), state, 0, 100.0, LIMITS)
    assert isinstance(look, Look)
    life, _ = step(life, States(life.turn, of), 101.0, LIMITS)
    assert life.state is after


def test_a_process_that_cannot_be_killed_is_left_behind_by_name() -> None:
    life, _ = went(parked(), Died("process 7 has ended"))
    assert life.state is ParkState.LOST
    life, actions = step(life, Tick(), LIMITS.kill_s + 1, LIMITS)
    assert life.state is ParkState.GONE
    assert "could not be killed" in life.text
    assert actions[-1] == Forget()
