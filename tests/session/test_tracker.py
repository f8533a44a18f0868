"""The life of a session: one owner at a time, generations in step, and nothing after the end."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.session.ids import SessionId
from midstream.session.tracker import ENDED, Failed, Owner, SessionState, Tracker, WrongTransition

S = SessionId("5" * 32)
workers = st.sampled_from(["w0", "w1"])
epochs = st.integers(1, 3)
CAN = {
    SessionState.ADMITTED: {"placed"},
    SessionState.RUNNING: {"interrupted"},
    SessionState.INTERRUPTED: {"placed"},
    SessionState.RESTORING: {"interrupted", "resumed"},
}


class TrackerMachine(RuleBasedStateMachine):
    """Every event in every state: it happens, or is refused and changes nothing."""

    @initialize()
    def admit(self) -> None:
        self.now = Tracker(S)
        self.placements: list[Owner] = []
        self.interruptions = 0

    def allowed(self, event: str) -> bool:
        return event in CAN.get(self.now.state, set())

    @rule(worker=workers, epoch=epochs)
    def placed(self, worker: str, epoch: int) -> None:
        before = self.now
        if not self.allowed("placed"):
            with pytest.raises(WrongTransition):
                before.placed(worker, epoch)
            return
        self.now = before.placed(worker, epoch)
        assert self.now.owner == Owner(worker, epoch, before.generation + 1)
        self.placements.append(self.now.owner)
        first = before.state is SessionState.ADMITTED
        assert self.now.state is (SessionState.RUNNING if first else SessionState.RESTORING)

    @rule(reason=st.sampled_from(["eof", "stall"]))
    def interrupted(self, reason: str) -> None:
        before = self.now
        if not self.allowed("interrupted"):
            with pytest.raises(WrongTransition):
                before.interrupted(reason)
            return
        self.now = before.interrupted(reason)
        self.interruptions += 1
        assert self.now.failovers[-1] == Failed(reason)
        if before.state is SessionState.RESTORING:
            assert self.now.failovers[-2].outcome == "interrupted"

    @rule(outcome=st.sampled_from(["exact", "recomputed"]))
    def resumed(self, outcome: str) -> None:
        before = self.now
        told = Failed("not the reason", outcome)
        if not self.allowed("resumed"):
            with pytest.raises(WrongTransition):
                before.resumed(told)
            return
        self.now = before.resumed(told)
        assert self.now.failovers[-1] == Failed(before.failovers[-1].reason, outcome)

    @rule(state=st.sampled_from(SessionState))
    def ended(self, state: SessionState) -> None:
        before = self.now
        if state not in ENDED or before.state in ENDED:
            with pytest.raises(WrongTransition):
                before.ended(state)
            return
        self.now = before.ended(state)
        assert self.now.state is state

    @precondition(lambda self: self.now.state in ENDED)
    @rule()
    def the_end_keeps_what_was(self) -> None:
        assert self.now.owner == (self.placements[-1] if self.placements else None)

    @invariant()
    def one_owner_and_generations_in_step(self) -> None:
        if not hasattr(self, "now"):
            return
        assert [owner.generation for owner in self.placements] == list(range(1, len(self.placements) + 1))
        assert self.now.generation == len(self.placements)
        assert len(self.now.failovers) == self.interruptions


TestTracker = TrackerMachine.TestCase


def test_what_came_before_is_never_changed() -> None:
    admitted = Tracker(S)
    running = admitted.placed("w0", 1)
    lost = running.interrupted("eof")
    again = lost.placed("w1", 1).resumed(Failed("", "exact"))
    assert (admitted.state, running.state, lost.state, again.state) == (
        SessionState.ADMITTED, SessionState.RUNNING, SessionState.INTERRUPTED, SessionState.RUNNING,
    )  # fmt: skip
    assert lost.failovers == (Failed("eof"),)
    assert again.failovers == (Failed("eof", "exact"),)


def test_an_error_names_the_session_and_what_was_expected() -> None:
    with pytest.raises(WrongTransition, match=f"{S}: admitted, expected running or restoring"):
        Tracker(S).interrupted("eof")
    with pytest.raises(WrongTransition, match="ended twice"):
        Tracker(S).ended(SessionState.FAILED).ended(SessionState.FINISHED)
    with pytest.raises(WrongTransition, match="running is no ending"):
        Tracker(S).ended(SessionState.RUNNING)
