"""Who waits for a session to come to an arena is told when it waits there, or why it never will."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.ids import SessionId
from midstream.sidecar.mover.arrivals import Arrivals
from midstream.sidecar.mover.protocol import MoverError, Reason
from support.mover_rig import prompt_hash

SESSION = SessionId("1" * 32)
OTHER = SessionId("2" * 32)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ArenaWriter]:
    create_arena(tmp_path / "a.arena", slot_count=64, page_count=256)
    writer = ArenaWriter(tmp_path / "a.arena")
    yield writer
    writer.close()


@pytest.fixture
def reader(arena: ArenaWriter, tmp_path: Path) -> Iterator[ArenaReader]:
    with closing(ArenaReader(tmp_path / "a.arena")) as reader:
        yield reader


def admit(writer: ArenaWriter, session: SessionId, generation: int = 2) -> SlotWriter:
    slot = writer.admit(session, generation, 3, prompt_hash([1, 2, 3]), [7, 8])
    assert slot is not None
    return slot


def waits(
    arrivals: Arrivals, reader: ArenaReader, session: SessionId, within_s: float = 10.0
) -> "asyncio.Task[object]":
    return asyncio.create_task(arrivals.waiting(reader, session, 2, time.monotonic() + within_s))


async def test_a_session_is_told_when_it_waits_and_not_before(arena: ArenaWriter, reader: ArenaReader) -> None:
    task = waits(Arrivals(), reader, SESSION)
    await asyncio.sleep(0.01)
    admit(arena, SESSION, 1).report(LoadState.WAITING, 0, 0)
    slot = admit(arena, SESSION)
    await asyncio.sleep(0.01)
    assert not task.done()
    slot.report(LoadState.WAITING, 0, 0)
    found = await asyncio.wait_for(task, 1)
    assert found == reader.find(SESSION, 2)


async def test_many_who_come_together_are_told_by_the_same_look(
    arena: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [SessionId(f"{n:032x}") for n in range(32)]
    slots = [admit(arena, session) for session in sessions]
    arrivals, looks, look = Arrivals(), list[int](), ArenaReader.look

    def counted(self: ArenaReader) -> None:
        looks.append(1)
        look(self)

    monkeypatch.setattr(ArenaReader, "look", counted)
    for slot in slots:
        slot.report(LoadState.WAITING, 0, 0)
    await asyncio.gather(*(waits(arrivals, reader, session) for session in sessions))
    assert len(looks) == 1


@pytest.mark.parametrize("way", ["finished", "done", "token"])
async def test_who_goes_on_without_waiting_is_gone(arena: ArenaWriter, reader: ArenaReader, way: str) -> None:
    arrivals = Arrivals()
    task, other = waits(arrivals, reader, SESSION), waits(arrivals, reader, OTHER)
    await asyncio.sleep(0.01)
    slot = admit(arena, SESSION)
    match way:
        case "finished":
            slot.finish("stop")
        case "done":
            slot.report(LoadState.DONE, 4, 0)
        case _:
            slot.append_tokens([9])
    with pytest.raises(MoverError) as caught:
        await asyncio.wait_for(task, 1)
    assert caught.value.reason is Reason.GONE
    admit(arena, OTHER).report(LoadState.WAITING, 0, 0)
    await asyncio.wait_for(other, 1)


async def test_whoever_waits_is_told_in_his_time(arena: ArenaWriter, reader: ArenaReader) -> None:
    arrivals = Arrivals()
    patient, hasty = waits(arrivals, reader, SESSION), waits(arrivals, reader, OTHER, 0.05)
    with pytest.raises(MoverError, match=r"no room within 0\.05 s") as caught:
        await asyncio.wait_for(hasty, 1)
    assert caught.value.reason is Reason.DESTINATION
    patient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patient
    # Nobody waits, so nobody looks.
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) == 1


async def test_what_stops_a_look_is_told_to_everybody(
    arena: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = Arrivals()
    tasks = [waits(arrivals, reader, session) for session in (SESSION, OTHER)]
    await asyncio.sleep(0.01)

    def broken(self: ArenaReader) -> None:
        raise RuntimeError("this cannot be")

    monkeypatch.setattr(ArenaReader, "look", broken)
    for task in tasks:
        with pytest.raises(RuntimeError, match="cannot be"):
            await asyncio.wait_for(task, 1)
