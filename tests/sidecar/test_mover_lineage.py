"""Whose KV was computed again, and what descends from it."""

from dataclasses import replace

import pytest

from midstream.session.ids import SessionId
from midstream.session.records import LoadState, Slot, SlotState
from midstream.sidecar.mover import lineage
from midstream.sidecar.mover.lineage import Lineage, computed_again

SLOT = Slot(0, 1, SessionId("a" * 32), 3, SlotState.LIVE, 5, "b" * 32)


def test_a_session_that_never_changed_owners_was_computed_once() -> None:
    assert not computed_again(SLOT)


def test_outputs_that_were_told_without_kv_are_computed_again() -> None:
    assert computed_again(replace(SLOT, resumed=4, load=LoadState.FAILED, recomputed=9))
    assert computed_again(replace(SLOT, resumed=4))


def test_outputs_whose_kv_was_brought_are_not() -> None:
    assert not computed_again(replace(SLOT, resumed=4, load=LoadState.DONE, loaded=8))


def test_one_output_has_no_kv_that_could_be() -> None:
    assert not computed_again(replace(SLOT, resumed=1, load=LoadState.FAILED, recomputed=6))


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "OWNERS_MAX", 2)
    known = Lineage()
    for generation in (1, 2, 3):
        known.note(SLOT.session, generation)
    assert [known.descends(SLOT.session, generation) for generation in (1, 2, 3)] == [False, True, True]
    assert known.is_again(SLOT)
    assert not known.is_again(replace(SLOT, generation=1))
