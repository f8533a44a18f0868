"""A store made of objects: the contract, over objects in memory, and what only a store elsewhere has to bear."""

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import pytest
from contracts.store_suite import OTHER, SESSION, StoreContract, block, snapshot_of, write

from midstream.session import chunk
from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.memory_objects import MemoryObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore

PREFIX = "fleet/1/"


class Guessed(MemoryObjects):
    """Objects that nobody can list, as in Mooncake."""

    lists_folders = False


class Failing(MemoryObjects):
    """Fails, or ends for good, at the call that is named."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fails_at = 0

    def _tick(self) -> None:
        self.calls += 1
        if self.fails_at and self.calls >= self.fails_at:
            raise ReplicaError(Refusal.UNREACHABLE, "it is down")

    def put(self, name: str, content: bytes) -> None:
        self._tick()
        super().replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        self._tick()
        super().replace(name, content)

    def remove(self, names: Collection[str]) -> None:  # type: ignore[override]
        self._tick()
        super().remove(names)


def opened(objects: MemoryObjects, writer: str = "node-a", bytes_max: int = 1 << 30) -> ObjectStore:
    return ObjectStore(objects, Names(PREFIX, writer), bytes_max=bytes_max)


@pytest.fixture(params=[MemoryObjects, Guessed])
def objects(request: pytest.FixtureRequest) -> MemoryObjects:
    made: MemoryObjects = request.param()
    return made


@pytest.fixture
def store(objects: MemoryObjects) -> ObjectStore:
    return opened(objects)


@pytest.fixture
def reopen(objects: MemoryObjects) -> Callable[[], ObjectStore]:
    return lambda: opened(objects)


@pytest.fixture
def damage(objects: MemoryObjects) -> Callable[..., None]:
    def damage(name: str, *, gone: bool = False) -> None:
        place = f"{PREFIX}chunks/node-a/{name}"
        stored = objects.get(place, 1 << 30)
        assert stored is not None
        if gone:
            objects.remove([place])
        else:
            objects.replace(place, stored[:-3] + bytes([stored[-3] ^ 1]) + stored[-2:])

    return damage


class TestContract(StoreContract):
    """What every store must do."""


def test_a_snapshot_whose_chunks_were_evicted_is_not_offered_and_the_one_before_is(
    objects: MemoryObjects, store: ObjectStore, damage: Callable[..., None]
) -> None:
    older = write(store, range(3))
    newer = write(store, range(4), created_at=2000.0)
    damage(newer.chunks[3], gone=True)
    assert opened(objects).latest(SESSION) == older
    damage(newer.chunks[0], gone=True)
    assert opened(objects).latest(SESSION) is None
    assert store.latest(SESSION) is None
    assert store.incomplete == 2


def test_what_was_evicted_is_put_again_with_the_next_snapshot(store: ObjectStore, damage: Callable[..., None]) -> None:
    first = write(store, range(3))
    damage(first.chunks[1], gone=True)
    with store.begin() as draft:
        assert draft.keep_all(first.chunks) == {first.chunks[0], first.chunks[2]}
        draft.put_stored(first.chunks[1], chunk.encode(block(1))[1])
        draft.publish(replace(first, created_at=2000.0))
    assert [store.get_chunk(name) for name in first.chunks] == [block(n) for n in range(3)]


def test_an_owner_that_was_replaced_never_takes_the_place_of_the_newer_one(objects: MemoryObjects) -> None:
    old, new = opened(objects, "node-a"), opened(objects, "node-b")
    write(old, range(2), generation=1)
    newest = write(new, range(3), generation=2, created_at=1500.0)
    # It was cut off and does not know; it even has more, and writes later.
    for count in range(4, 9):
        write(old, range(count), generation=1, created_at=3000.0 + count)
        assert new.latest(SESSION) == old.latest(SESSION) == newest
    old.finish(SESSION)
    old.delete(SESSION)
    assert new.latest(SESSION) == newest
    assert new.get_chunk(newest.chunks[0]) == block(0)


def test_a_node_reads_what_another_one_has_written(objects: MemoryObjects) -> None:
    manifest = write(opened(objects, "node-a"), range(5))
    other = opened(objects, "node-b")
    assert other.latest(SESSION) == manifest
    assert [other.get_chunk(name) for name in manifest.chunks] == [block(n) for n in range(5)]
    assert chunk.decode(manifest.chunks[0], other.get_stored(manifest.chunks[0])) == block(0)
    # And counts only its own.
    assert other.figures().size_bytes == 0


def test_what_one_writer_sweeps_is_never_anothers(objects: MemoryObjects) -> None:
    a, b = opened(objects, "node-a"), opened(objects, "node-b")
    write(a, range(3))
    theirs = write(b, range(3), OTHER)
    a.delete(SESSION)
    a.sweep()
    assert [b.get_chunk(name) for name in theirs.chunks] == [block(n) for n in range(3)]
    assert b.latest(OTHER) == theirs


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_writer_that_dies_at_any_point_leaves_the_latest_as_it_was_or_the_new_one(fails_at: int) -> None:
    objects = Failing()
    store = opened(objects)
    write(store, range(2))
    before = write(store, range(3), created_at=2000.0)
    objects.calls, objects.fails_at = 0, fails_at
    after = snapshot_of(tuple(chunk.chunk_name(block(n)) for n in range(4)), created_at=3000.0)
    with contextlib.suppress(StoreError):
        write(store, range(4), created_at=3000.0)
    objects.fails_at = 0
    again = opened(objects)
    found = again.latest(SESSION)
    assert found in (before, after)
    assert found is not None
    assert [again.get_chunk(name) for name in found.chunks] == [block(n) for n in range(len(found.chunks))]
    # What was left behind half-written is swept, and the next one is written as ever.
    again.sweep()
    write(again, range(5), created_at=4000.0)
    assert again.latest(SESSION) is not None
    assert again.figures().size_bytes == opened(objects).figures().size_bytes


def test_a_service_that_loses_nothing_is_not_asked_again_and_again(objects: MemoryObjects) -> None:
    class Counting:
        asked = 0

    present = objects.present

    def counted(names: Collection[str]) -> frozenset[str]:
        Counting.asked += len([name for name in names if "/chunks/" in name])
        return present(names)

    objects.present = counted  # type: ignore[method-assign, assignment]
    store = ObjectStore(objects, Names(PREFIX, "node-a"), bytes_max=1 << 30, trust_s=60.0)
    manifest = write(store, range(10))
    with store.begin() as draft:
        assert draft.keep_all(manifest.chunks) == set(manifest.chunks)
        draft.publish(replace(manifest, created_at=2000.0))
    assert store.latest(SESSION) is not None
    assert Counting.asked == 0
    # Whoever reads what another has written asks for all of it.
    assert opened(objects, "node-b").latest(SESSION) is not None
    assert Counting.asked == 10
    # What it has removed itself is not taken to be there.
    store.delete(SESSION)
    with store.begin() as draft:
        assert draft.keep_all(manifest.chunks) == frozenset()


def test_a_full_store_lets_finished_sessions_go_first_and_then_says_so(objects: MemoryObjects) -> None:
    store = ObjectStore(objects, Names(PREFIX, "node-a"), bytes_max=100_000, clock=lambda: 1000.0)
    sessions = [SessionId(f"{n:032x}") for n in range(1, 6)]

    def write_one(session: SessionId) -> None:
        with store.begin() as draft:
            draft.publish(snapshot_of((draft.put_chunk(os.urandom(22_000)),), session))

    for session in sessions[:4]:
        write_one(session)
    with pytest.raises(ReplicaError) as full:
        write_one(sessions[4])
    assert full.value.reason is Refusal.FULL
    assert all(store.latest(session) is not None for session in sessions[:4])
    store.finish(sessions[2])
    write_one(sessions[4])
    assert [store.latest(session) is not None for session in sessions] == [True, True, False, True, True]
    assert store.figures().evicted == 1
    assert 88_000 < store.figures().size_bytes <= 100_000


def test_a_block_that_was_damaged_only_on_its_way_is_read_once_more() -> None:
    class Flipping(MemoryObjects):
        flips = 0

        def get(self, name: str, bytes_max: int) -> bytes | None:
            found = super().get(name, bytes_max)
            if found is not None and self.flips and "/chunks/" in name:
                self.flips -= 1
                return found[:-1] + bytes([found[-1] ^ 4])
            return found

    objects = Flipping()
    store = opened(objects)
    manifest = write(store, range(2))
    objects.flips = 1
    assert store.get_chunk(manifest.chunks[0]) == block(0)
    assert store.figures().corrupt == 1
    objects.flips = 2
    with pytest.raises(CorruptError):
        store.get_chunk(manifest.chunks[0])
    assert store.latest(SESSION) is None


def test_bytes_that_are_not_the_chunk_are_refused_before_they_are_sent(store: ObjectStore) -> None:
    name, stored = chunk.encode(block(1))
    with store.begin() as draft:
        for at in (0, 5, 20, 40, 47, 48, len(stored) - 1):
            with pytest.raises(CorruptError):
                draft.put_stored(name, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
        with pytest.raises(CorruptError):
            draft.put_stored("0" * 32, stored)
        assert store.figures().size_bytes == 0


@pytest.mark.parametrize("call", ["put", "present"])
def test_a_draft_that_is_left_while_a_thread_still_writes_for_it_keeps_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()
    store = opened(objects)
    raw = block(1)
    name, stored = chunk.chunk_name(raw), chunk.encode(raw)[1]
    if call == "present":
        # It is there, and held by another draft when this one asks to have it kept.
        other = store.begin()
        other.put_stored(name, stored)
    reached, may = threading.Event(), threading.Event()
    original = getattr(objects, call)

    def slowly(*arguments: object) -> object:
        reached.set()
        assert may.wait(10)
        return original(*arguments)

    monkeypatch.setattr(objects, call, slowly)
    draft = store.begin()
    errors: list[StoreError] = []

    def work() -> None:
        try:
            if call == "put":
                draft.put_stored(name, stored)
            else:
                draft.keep(name)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(10)
    draft.__exit__(None, None, None)
    may.set()
    thread.join(10)
    [error] = errors
    assert "left" in str(error)
    if call == "present":
        assert store.figures().size_bytes > 0
        other.__exit__(None, None, None)
    assert store.figures().size_bytes == 0
    # And it is one draft that was left, not two.
    assert store._drafts == 0


def test_drafts_are_bounded(store: ObjectStore) -> None:
    with_them = [store.begin() for _ in range(256)]
    with pytest.raises(ReplicaError) as busy:
        store.begin()
    assert busy.value.reason is Refusal.BUSY
    for draft in with_them:
        draft.__exit__(None, None, None)
    with store.begin() as draft:
        draft.put_chunk(block(1))


def test_a_session_that_had_very_many_owners_is_found_where_names_are_guessed() -> None:
    objects = Guessed()
    store = opened(objects)
    for generation in range(1, 700, 100):
        manifest = write(store, range(2), generation=generation, created_at=1000.0 + generation)
    assert store.latest(SESSION) in (manifest, None)
    assert opened(objects).latest(OTHER) is None


def test_readers_and_a_writer_of_another_process_see_only_whole_snapshots(objects: MemoryObjects) -> None:
    writer, reader = opened(objects), opened(objects, "node-b")
    write(writer, range(1))
    wrong: list[object] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            found = reader.latest(SESSION)
            if found is not None and found.kv_len != 4 * len(found.chunks):
                wrong.append(found)

    thread = threading.Thread(target=read)
    thread.start()
    for count in range(2, 60):
        write(writer, range(count), created_at=1000.0 + count)
    over.set()
    thread.join(30)
    assert not wrong


def test_a_manifest_of_another_session_or_generation_in_its_place_is_none(objects: MemoryObjects) -> None:
    store = opened(objects)
    write(store, range(2))
    names = Names(PREFIX, "node-a")
    stored = objects.get(names.slot(SESSION, 1, 0), 1 << 20)
    assert stored is not None
    objects.replace(names.slot(OTHER, 1, 0), stored)
    objects.replace(names.slot(SESSION, 9, 0), stored)
    assert store.latest(OTHER) is None
    found = store.latest(SESSION)
    assert found is not None
    assert found.generation == 1
    assert store.figures().corrupt == 2


def _each_byte_flipped(stored: bytes) -> Iterator[bytes]:
    for at in range(len(stored)):
        yield stored[:at] + bytes([stored[at] ^ (1 << at % 8)]) + stored[at + 1 :]


def test_no_flipped_byte_of_a_manifest_leads_to_wrong_bytes(objects: MemoryObjects) -> None:
    store = opened(objects)
    manifest = write(store, range(2))
    place = Names(PREFIX, "node-a").slot(SESSION, 1, 0)
    stored = objects.get(place, 1 << 20)
    assert stored is not None
    for damaged in _each_byte_flipped(stored):
        objects.replace(place, damaged)
        found = opened(objects).latest(SESSION)
        # Only the name of the writer is not proven, and it leads to no chunk.
        assert found is None or found == manifest


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_reader_that_is_slower_than_the_writer_looks_again(objects: MemoryObjects, times: int) -> None:
    """In a service where an object is removed before another takes its name, both slots may be empty when read."""
    write(opened(objects), range(2), generation=1)
    manifest = write(opened(objects, "node-c"), range(3), generation=2)
    reader = opened(objects, "node-b")
    listed = reader._manifests
    away: dict[str, bytes] = {}
    left = [times]

    def overtaken(session: SessionId):  # type: ignore[no-untyped-def]
        for name, stored in away.items():
            objects.replace(name, stored)
        names = listed(session)
        away.clear()
        if left[0]:
            left[0] -= 1
            # Those of the newer owner; the older one's stay.
            away.update({name: objects.get(name, 1 << 20) or b"" for name in names if "/0000000002." in name})
            objects.remove(list(away))
        return names

    reader._manifests = overtaken  # type: ignore[method-assign]
    assert reader.latest(SESSION) == manifest
    assert left == [0]


def test_a_reader_does_not_look_for_ever(objects: MemoryObjects) -> None:
    manifest = write(opened(objects), range(3))
    reader = opened(objects, "node-b")
    looks = []
    listed = reader._manifests
    reader._manifests = lambda session: looks.append(session) or listed(session)  # type: ignore[method-assign, func-returns-value]
    objects.remove([f"{PREFIX}chunks/node-a/{manifest.chunks[0]}"])
    assert reader.latest(SESSION) is None
    assert len(looks) == 2
    assert reader.latest(OTHER) is None
    assert len(looks) == 3
