"""What a restarted engine takes over: only what the old arena proves, and only where it fits."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from midstream.adapters import alive
from midstream.adapters.transformers.adopt import Reservation, find_old_pool
from midstream.adapters.transformers.extents import Run
from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.errors import ArenaError, MidstreamError, PoolError
from midstream.session.held import HolderClient, create_host_pool
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.session.layout import Plane, PoolLayout, PoolMeta

LAYOUT = PoolLayout(8, 4, (Plane(0, 16, 16), Plane(128, 16, 16)))
KEY = dict.fromkeys(REQUIRED, "x")
HASH = "0f" * 16
# This process, as it was before it was started: one that is gone.
GONE = {"processes": [[os.getpid(), 1]]}


class OnePool:
    """A holder that keeps one pool."""

    def __init__(self, layout: PoolLayout = LAYOUT) -> None:
        self.given: list[int] = []
        self._fd = create_host_pool(layout.end)
        self._meta = PoolMeta(layout.end, layout, layout.fingerprint(), {}).to_json()

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        if name != "w/1/0":
            raise PoolError(f"no pool {name} is held")
        self.given.append(os.dup(self._fd))
        return self.given[-1], self._meta

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def holder() -> Iterator[OnePool]:
    with closing(OnePool()) as pool:
        yield pool


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[tuple[Path, ArenaWriter]]:
    path = tmp_path / "arena"
    create_arena(path, slot_count=8, page_count=32)
    writer = ArenaWriter.open(path)
    writer.publish({"v": 1, **GONE, "key": KEY, "pools": ["w/1/0"]})
    yield path, writer
    writer.close()


def session(number: int) -> SessionId:
    return SessionId(f"{number:032x}")


def find(path: Path, holder: OnePool, layout: PoolLayout = LAYOUT, **key: str) -> Any:
    return find_old_pool(path, cast(HolderClient, holder), layout, {**KEY, **key})


def live(writer: ArenaWriter, number: int, blocks: tuple[int, ...], tokens: int, generation: int = 1) -> Any:
    slot = writer.admit(session(number), generation, 5, HASH)
    assert slot is not None
    slot.set_blocks(blocks)
    slot.append_tokens(range(tokens))
    return slot


def test_live_sessions_are_found_with_their_blocks(arena: tuple[Path, ArenaWriter], holder: OnePool) -> None:
    path, writer = arena
    live(writer, 1, (0, 1, 2), 4)
    live(writer, 2, (3, 4), 1)
    old = find(path, holder)
    assert old.name == "w/1/0"
    assert {r.session: (r.run, r.covered) for r in old.reservations} == {
        session(1): (Run(0, 3), 8),
        session(2): (Run(3, 2), 5),
    }
    os.close(old.fd)


def test_what_proves_nothing_is_left(arena: tuple[Path, ArenaWriter], holder: OnePool) -> None:
    path, writer = arena
    live(writer, 1, (0, 1), 0)  # not a token yet
    live(writer, 2, (2, 4), 3)  # blocks with a gap
    live(writer, 3, (6, 7, 8), 3)  # a block that the pool has not
    live(writer, 4, (5,), 9)  # more positions than its blocks have
    live(writer, 5, (3, 4), 2).finish("stop")
    waiting = writer.admit(session(6), 2, 5, HASH, outputs=(1, 2))
    assert waiting is not None
    waiting.set_blocks((6, 7))
    waiting.report(LoadState.WAITING, 0, 0)
    old = find(path, holder)
    assert old.reservations == ()
    os.close(old.fd)


def test_of_two_owners_the_newer_counts(arena: tuple[Path, ArenaWriter], holder: OnePool) -> None:
    path, writer = arena
    live(writer, 1, (4, 5), 3, generation=4)
    live(writer, 1, (0, 1), 3, generation=2)
    old = find(path, holder)
    assert [r.run for r in old.reservations] == [Run(4, 2)]
    os.close(old.fd)


def test_re_entered_outputs_prove_only_what_was_loaded(arena: tuple[Path, ArenaWriter]) -> None:
    path, writer = arena
    slot = writer.admit(session(1), 2, 5, HASH, outputs=(7, 8, 9))
    assert slot is not None
    with closing(ArenaReader(path)) as reader:

        def covered() -> int:
            found = reader.find(session(1))
            assert found is not None
            return reader.kv_len(found)

        assert covered() == 0
        slot.report(LoadState.FAILED, 0, 0)
        assert covered() == 0
        slot.report(LoadState.DONE, 6, 0)
        assert covered() == 6
        slot.append_tokens((10,))
        assert covered() == 8


def test_another_key_layout_or_holder_gives_nothing(arena: tuple[Path, ArenaWriter], holder: OnePool) -> None:
    path, writer = arena
    with pytest.raises(PoolError, match="key differs in dtype"):
        find(path, holder, dtype="other")
    smaller = PoolLayout(7, 4, (Plane(0, 16, 16), Plane(128, 16, 16)))
    with pytest.raises(PoolError, match="another layout"):
        find(path, holder, smaller)
    # The descriptor that came with it is closed again.
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(holder.given[-1])
    writer.publish({"v": 1, **GONE, "key": KEY, "pools": ["w/9/0"]})
    with pytest.raises(PoolError, match="no pool w/9/0"):
        find(path, holder)
    writer.publish({"v": 1, **GONE, "key": KEY, "pools": []})
    with pytest.raises(ArenaError, match="never published a pool"):
        find(path, holder)
    writer.publish({"v": 1, **GONE, "key": {"engine": "x"}, "pools": ["w/1/0"]})
    with pytest.raises(PoolError, match="missing"):
        find(path, holder)


def test_a_pool_is_left_alone_while_a_process_of_its_engine_is_left(
    arena: tuple[Path, ArenaWriter], holder: OnePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writer = arena
    monkeypatch.setattr(alive, "GONE_WITHIN_S", 0.1)
    live(writer, 1, (0, 1, 2), 4)
    for facts in (alive.told_processes(), {"pid": os.getpid()}, {}):
        writer.publish({"v": 1, **facts, "key": KEY, "pools": ["w/1/0"]})
        with pytest.raises(PoolError, match=r"still runs|do not say"):
            find(path, holder)
    assert holder.given == []


def test_a_file_that_is_no_arena_is_an_error_and_not_a_crash(tmp_path: Path, holder: OnePool) -> None:
    (tmp_path / "torn").write_bytes(b"MIDARENA" + b"\x01" * 100_000)
    for name in ("torn", "missing"):
        with pytest.raises(MidstreamError, match=name):
            find(tmp_path / name, holder)


def test_a_reservation_answers_only_for_its_own_tokens() -> None:
    kept = Reservation(session(1), Run(0, 3), 5, HASH, (1, 2, 3), 7)
    assert kept.positions_for(5, HASH, (1, 2, 3)) == 7
    assert kept.positions_for(5, HASH, (1,)) == 5
    assert kept.positions_for(5, HASH, (1, 2, 3, 4)) == 0
    assert kept.positions_for(5, HASH, (1, 9)) == 0
    assert kept.positions_for(5, HASH, ()) == 0
    assert kept.positions_for(6, HASH, (1,)) == 0
    assert kept.positions_for(5, "00" * 16, (1,)) == 0
