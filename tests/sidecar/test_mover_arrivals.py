"""Looks at an arena for sessions that are awaited there."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.ids import SessionId
from midstream.sidecar.mover.arrivals import LOOK_S, Arrivals
from support.mover_rig import prompt_hash

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)


class Clock:
    """A clock that goes on by `step_s` each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ArenaWriter]:
    create_arena(tmp_path / "a.arena", slot_count=8, page_count=16)
    writer = ArenaWriter(tmp_path / "a.arena")
    yield writer
    writer.close()


def admit(writer: ArenaWriter, session: SessionId, generation: int) -> None:
    assert writer.admit(session, generation, 3, prompt_hash([1, 2, 3])) is not None


def test_a_session_is_found_by_its_generation_at_the_next_look(arena: ArenaWriter, tmp_path: Path) -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    with closing(ArenaReader(tmp_path / "a.arena")) as reader:
        assert arrivals.find(reader, SESSION, 2) is None
        admit(arena, SESSION, 1)
        admit(arena, SESSION, 2)
        assert arrivals.find(reader, SESSION, 2) is None
        clock.now_s += LOOK_S
        found = arrivals.find(reader, SESSION, 2)
        assert found is not None
        assert (found.session, found.generation) == (SESSION, 2)
        assert arrivals.find(reader, OTHER, 2) is None


def test_looks_that_take_long_are_used_for_longer(arena: ArenaWriter, tmp_path: Path) -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    with closing(ArenaReader(tmp_path / "a.arena")) as reader:
        clock.step_s = 1.0
        assert arrivals.find(reader, SESSION, 2) is None
        admit(arena, SESSION, 2)
        clock.step_s = 0.0
        clock.now_s += 1.9
        assert arrivals.find(reader, SESSION, 2) is None
        clock.now_s += 0.1
        assert arrivals.find(reader, SESSION, 2) is not None


def test_another_arena_at_the_same_path_is_looked_at_anew(arena: ArenaWriter, tmp_path: Path) -> None:
    arrivals = Arrivals(Clock())
    with closing(ArenaReader(tmp_path / "a.arena")) as reader, closing(ArenaReader(tmp_path / "a.arena")) as again:
        assert arrivals.find(reader, SESSION, 2) is None
        admit(arena, SESSION, 2)
        assert arrivals.find(reader, SESSION, 2) is None
        assert arrivals.find(again, SESSION, 2) is not None
        arrivals.forget(reader.path)
        assert arrivals.find(reader, SESSION, 2) is not None
