"""The life of an engine, transition by transition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.supervise import (
    BACKOFF_MAX_S,
    Action,
    BecameHealthy,
    Died,
    DrainAsked,
    Event,
    Gone,
    KillTree,
    Life,
    Policy,
    Spawn,
    StartAsked,
    StopAsked,
    TellDeath,
    TellState,
    Tick,
    WorkerState,
    backoff_s,
    step,
)

S = WorkerState
POLICY = Policy(start_timeout_s=100, stop_timeout_s=7, restart_backoff_s=2, restarts_max=3, restarts_window_s=1000)


def life(state: WorkerState, *, wanted: bool = True, deadline_s: float | None = None) -> Life:
    return Life(state, epoch=4, is_wanted=wanted, deadline_s=deadline_s, was_ready=True)


TABLE: list[tuple[str, Life, Event, WorkerState, tuple[type[Action], ...]]] = [
    ("stopped, started", life(S.STOPPED, wanted=False), StartAsked(), S.STARTING, (TellState, Spawn)),
    ("failed, started", life(S.FAILED), StartAsked(), S.STARTING, (TellState, Spawn)),
    ("ready, started again", life(S.READY), StartAsked(), S.READY, ()),
    ("starting, healthy", life(S.STARTING), BecameHealthy(4), S.READY, (TellState,)),
    ("starting, an older epoch healthy", life(S.STARTING), BecameHealthy(3), S.STARTING, ()),
    ("dead, healthy", life(S.DEAD), BecameHealthy(4), S.DEAD, ()),
    ("starting, died", life(S.STARTING), Died(4, "x"), S.DEAD, (TellDeath, TellState, KillTree)),
    ("starting, too late", life(S.STARTING, deadline_s=10), Tick(), S.DEAD, (TellDeath, TellState, KillTree)),
    ("starting, in time", life(S.STARTING, deadline_s=11), Tick(), S.STARTING, ()),
    ("ready, died", life(S.READY), Died(4, "x"), S.DEAD, (TellDeath, TellState, KillTree)),
    ("ready, an older epoch died", life(S.READY), Died(3, "x"), S.READY, ()),
    ("ready, drained", life(S.READY), DrainAsked(), S.DRAINING, (TellState,)),
    ("draining, died", life(S.DRAINING), Died(4, "x"), S.DEAD, (TellDeath, TellState, KillTree)),
    ("draining, stopped", life(S.DRAINING), StopAsked(), S.DRAINING, (TellState, KillTree)),
    ("stopping, died", life(S.DRAINING, wanted=False), Died(4, "x"), S.DRAINING, ()),
    ("stopping, stopped again", life(S.DRAINING, wanted=False), StopAsked(), S.DRAINING, ()),
    ("stopping, gone", life(S.DRAINING, wanted=False), Gone(4), S.STOPPED, (TellState,)),
    ("dead, a second process died", life(S.DEAD), Died(4, "y"), S.DEAD, ()),
    ("dead, gone", life(S.DEAD), Gone(4), S.RESTARTING, (TellState,)),
    ("dead, an older epoch gone", life(S.DEAD), Gone(3), S.DEAD, ()),
    ("dead, stopped", life(S.DEAD), StopAsked(), S.DEAD, ()),
    ("dead and unwanted, gone", life(S.DEAD, wanted=False), Gone(4), S.STOPPED, (TellState,)),
    ("restarting, its turn", life(S.RESTARTING, deadline_s=10), Tick(), S.STARTING, (TellState, Spawn)),
    ("restarting, not yet", life(S.RESTARTING, deadline_s=10.1), Tick(), S.RESTARTING, ()),
    ("restarting, stopped", life(S.RESTARTING), StopAsked(), S.STOPPED, (TellState,)),
    ("failed, stopped", life(S.FAILED), StopAsked(), S.STOPPED, (TellState,)),
    ("starting, stopped", life(S.STARTING), StopAsked(), S.DRAINING, (TellState, KillTree)),
]


@pytest.mark.parametrize(("before", "event", "state", "actions"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_each_event_leads_where_the_table_says(
    before: Life, event: Event, state: WorkerState, actions: tuple[type[Action], ...]
) -> None:
    after, done = step(before, event, 10.0, POLICY)
    assert after.state is state
    assert tuple(type(action) for action in done) == actions


def test_a_new_epoch_is_one_more_than_the_last() -> None:
    _, actions = step(life(S.RESTARTING, deadline_s=1), Tick(), 1.0, POLICY)
    assert actions[-1] == Spawn(5)


def test_what_died_is_killed_at_once_and_what_is_stopped_gets_its_grace() -> None:
    assert step(life(S.READY), Died(4, "x"), 0, POLICY)[1][-1] == KillTree(4, 0.0)
    assert step(life(S.READY), StopAsked(), 0, POLICY)[1][-1] == KillTree(4, 7)


def crash(before: Life, now_s: float) -> Life:
    """Through death, removal, wait and start to being ready again, or to failed."""
    after, _ = step(before, Died(before.epoch, "x"), now_s, POLICY)
    after, _ = step(after, Gone(after.epoch), now_s, POLICY)
    if after.deadline_s is not None:
        after, _ = step(after, Tick(), after.deadline_s, POLICY)
        after, _ = step(after, BecameHealthy(after.epoch), now_s, POLICY)
    return after


def test_the_first_restart_is_at_once_and_each_later_one_waits_twice_as_long() -> None:
    assert [backoff_s(n, POLICY) for n in range(5)] == [0, 2, 4, 8, 16]
    assert backoff_s(100_000, POLICY) == BACKOFF_MAX_S


def test_a_worker_that_crashes_too_often_in_a_window_has_failed_and_the_remedy_is_told() -> None:
    now = life(S.READY)
    for _ in range(3):
        now = crash(now, 10.0)
        assert now.state is S.READY
    dead, _ = step(now, Died(now.epoch, "x"), 10.0, POLICY)
    failed, actions = step(dead, Gone(dead.epoch), 10.0, POLICY)
    assert failed.state is S.FAILED
    assert isinstance(actions[0], TellState)
    assert "supervise.restarts_max" in actions[0].text


def test_crashes_that_are_further_apart_than_the_window_never_add_up() -> None:
    now = life(S.READY)
    for index in range(20):
        now = crash(now, index * 400.0)  # never more than 3 in 1000 s
        assert now.state is S.READY


def test_a_command_that_was_never_ready_is_tried_twice_and_no_more() -> None:
    now, _ = step(Life(), StartAsked(), 0.0, POLICY)
    now, _ = step(step(now, Died(1, "x"), 0.0, POLICY)[0], Gone(1), 0.0, POLICY)
    now, _ = step(now, Tick(), 0.0, POLICY)
    assert (now.state, now.epoch) == (S.STARTING, 2)
    now, actions = step(step(now, Died(2, "x"), 0.0, POLICY)[0], Gone(2), 0.0, POLICY)
    assert now.state is S.FAILED
    assert isinstance(actions[0], TellState)
    assert actions[0].text.startswith("it was never ready in 2 starts")


def test_a_failed_worker_that_is_started_again_has_a_new_budget() -> None:
    spent = Life(S.FAILED, 4, True, (1.0, 2.0, 3.0))
    started, _ = step(spent, StartAsked(), 5.0, POLICY)
    assert started.restarts == ()
    assert step(step(started, Died(5, "x"), 5, POLICY)[0], Gone(5), 5, POLICY)[0].state is S.RESTARTING


EVENTS = st.one_of(
    st.sampled_from([StartAsked(), StopAsked(), DrainAsked(), Tick()]),
    st.builds(BecameHealthy, st.integers(0, 6)),
    st.builds(Died, st.integers(0, 6), st.just("x")),
    st.builds(Gone, st.integers(0, 6)),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 500)), max_size=60))
def test_two_epochs_never_run_at_once_and_restarts_stay_bounded(events: list[tuple[Event, float]]) -> None:
    now, now_s, running = Life(), 0.0, 0
    for event, passed_s in events:
        now_s += passed_s
        # Only a runner that killed the tree reports it gone.
        if isinstance(event, Gone) and now.state not in (S.DEAD, S.DRAINING):
            continue
        if isinstance(event, Gone) and now.state is S.DRAINING and now.is_wanted:
            continue
        before = now
        now, actions = step(now, event, now_s, POLICY)
        if isinstance(event, Gone) and event.epoch == before.epoch:
            running = 0
        for action in actions:
            if isinstance(action, Spawn):
                assert running == 0
                running = action.epoch
                assert action.epoch == before.epoch + 1
            if isinstance(action, KillTree | TellDeath):
                assert action.epoch == running
        assert len(now.restarts) <= POLICY.restarts_max
        assert (now.state is S.STOPPED) <= (running == 0)
