"""Mooncake Store: a real master, real clients, and what becomes of a snapshot when they die or evict."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.store_suite import OTHER, SESSION, StoreContract, block, snapshot_of, write

from midstream.session import chunk
from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.mooncake_objects import BUFFER_BYTES, MooncakeObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.remotes import Means, open_remote, parse_remotes
from support.mooncakes import VARIABLE, Deployment, python

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(python() is None, reason=f"{VARIABLE} names no interpreter with Mooncake"),
]
LENT = 256 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    deployment = Deployment()
    try:
        deployment.start_master()
        deployment.lend(LENT)
        yield deployment
    finally:
        deployment.close()


@pytest.fixture
def own() -> Iterator[Deployment]:
    """One that a test may kill. Leases are short, for what is leased is not evicted."""
    deployment = Deployment(flags=("-default_kv_lease_ttl", "200", "-client_ttl", "2"))
    try:
        deployment.start_master()
        yield deployment
    finally:
        deployment.close()


class Opened:
    """Stores of one deployment, under a name of their own."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.prefix = f"test-{os.urandom(6).hex()}/"
        self.stores: list[ObjectStore] = []
        self.objects: list[MooncakeObjects] = []

    def __call__(self, writer: str = "node-a", **config: object) -> ObjectStore:
        objects = MooncakeObjects(self.deployment.config(**config))
        self.objects.append(objects)
        self.stores.append(ObjectStore(objects, Names(self.prefix, writer), bytes_max=1 << 30))
        return self.stores[-1]

    def damage(self, name: str, *, gone: bool = False) -> None:
        place = f"{self.prefix}chunks/node-a/{name}"
        stored = self.objects[0].get(place, 1 << 26)
        assert stored is not None
        self.objects[0].remove([place])
        if not gone:
            self.objects[0].put(place, stored[:-3] + bytes([stored[-3] ^ 1]) + stored[-2:])

    def close(self) -> None:
        for objects in self.objects:
            objects.close()


@pytest.fixture
def opened(shared: Deployment) -> Iterator[Opened]:
    opened = Opened(shared)
    yield opened
    opened.close()


@pytest.fixture
def opened_own(own: Deployment) -> Iterator[Opened]:
    opened = Opened(own)
    yield opened
    opened.close()


@pytest.fixture
def store(opened: Opened) -> ObjectStore:
    return opened()


@pytest.fixture
def reopen(opened: Opened) -> Callable[[], ObjectStore]:
    return opened


@pytest.fixture
def damage(opened: Opened) -> Callable[..., None]:
    return opened.damage


class TestContract(StoreContract):
    """What every store must do."""


def random_chunk(size_bytes: int) -> tuple[str, bytes]:
    return chunk.encode(os.urandom(size_bytes))


def put(store: ObjectStore, session: SessionId, size_bytes: int, count: int, **changes: object) -> tuple[str, ...]:
    with store.begin() as draft:
        chunks = [random_chunk(size_bytes) for _ in range(count)]
        for name, stored in chunks:
            draft.put_stored(name, stored)
        names = tuple(name for name, _ in chunks)
        draft.publish(snapshot_of(names, session, **changes))
    return names


def test_another_node_reads_what_one_has_written_without_any_list(opened: Opened) -> None:
    manifest = write(opened("node-a"), range(5), generation=3)
    other = opened("node-b", admin=None)
    assert other.latest(SESSION) == manifest
    assert [other.get_chunk(name) for name in manifest.chunks] == [block(n) for n in range(5)]
    assert other.latest(OTHER) is None


def test_an_old_owner_never_takes_the_place_of_the_newer_one(opened: Opened) -> None:
    old, new = opened("node-a"), opened("node-b")
    write(old, range(2), generation=1)
    newest = write(new, range(3), generation=2, created_at=1500.0)
    for count in range(4, 8):
        write(old, range(count), generation=1, created_at=3000.0 + count)
        assert new.latest(SESSION) == old.latest(SESSION) == newest


def test_chunks_that_mooncake_has_evicted_make_a_snapshot_none(own: Deployment, opened_own: Opened) -> None:
    own.lend(32 << 20)
    store = opened_own()
    put(store, SESSION, 1 << 20, 8)
    assert store.latest(SESSION) is not None
    time.sleep(0.5)
    # Others fill the memory that all share; what was read longest ago goes first, whatever its snapshot would need.
    other = opened_own("node-b")
    for number in range(12):
        with contextlib.suppress(ReplicaError):
            put(other, SessionId(f"{number + 100:032x}"), 1 << 20, 4)
        time.sleep(0.3)
    assert store.latest(SESSION) is None
    assert store.incomplete >= 1
    # And its writer finds out, and writes it anew.
    fresh = put(store, SESSION, 1 << 20, 2, generation=2)
    assert store.latest(SESSION) is not None
    assert len(store.get_stored(fresh[0])) > 1 << 20


def test_a_master_that_is_killed_in_the_middle_of_a_write_costs_an_error_and_no_more(
    own: Deployment, opened_own: Opened
) -> None:
    own.lend(64 << 20)
    store = opened_own()
    before = write(store, range(3))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def write_on() -> int:
            for count in range(100_000):
                put(store, OTHER, 200_000, 2, created_at=float(2000 + count))
            return count

        writing = pool.submit(write_on)
        time.sleep(1.0)
        began = time.monotonic()
        own.kill_master()
        with pytest.raises(StoreError):
            writing.result(60)
    assert time.monotonic() - began < 45
    with pytest.raises(StoreError):
        store.latest(SESSION)
    # A new master knows nothing: no snapshot is offered, and writing goes on.
    own.start_master()
    own.lend(64 << 20)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert store.latest(SESSION) is None
            assert write(store, range(3), created_at=9000.0).chunks == before.chunks
            break
        except StoreError:
            assert time.monotonic() < deadline
            time.sleep(1)
    assert [store.get_chunk(name) for name in before.chunks] == [block(n) for n in range(3)]


def test_a_node_that_lent_memory_and_dies_takes_its_part_of_snapshots_with_it(
    own: Deployment, opened_own: Opened
) -> None:
    lender = own.lend(64 << 20)
    store = opened_own()
    manifest = write(store, range(3))
    lender.send_signal(signal.SIGKILL)
    # Until Mooncake notices, it says that they are there, and reading them is an error and never a wrong byte.
    with pytest.raises(StoreError):
        store.get_chunk(manifest.chunks[0])
    deadline = time.monotonic() + 30

    def is_offered() -> bool:
        try:
            return store.latest(SESSION) is not None
        except ReplicaError as error:
            return error.reason is Refusal.UNREACHABLE

    while is_offered():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_writer_that_is_killed_in_the_middle_of_a_snapshot_leaves_the_one_before(opened: Opened) -> None:
    store = opened()
    before = write(store, range(2))
    with store.begin() as draft:
        draft.put_chunk(block(7))
        helper = opened.objects[0]._helper
        assert helper is not None
        helper._process.send_signal(signal.SIGKILL)
        helper._process.wait()
        with pytest.raises(ReplicaError):
            draft.put_chunk(block(8))
    other = opened("node-b")
    assert other.latest(SESSION) == before
    # The client that died is replaced by itself.
    time.sleep(1.1)
    assert write(store, range(4), created_at=2000.0) == other.latest(SESSION)


def test_a_client_that_hangs_is_ended_in_time(shared: Deployment) -> None:
    objects = MooncakeObjects(shared.config(), call_s=1.0)
    objects.put("hang/x", b"x")
    assert objects._helper is not None
    objects._helper._process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ReplicaError) as slow:
        objects.present(["hang/x"])
    assert slow.value.reason is Refusal.SLOW
    assert time.monotonic() - began < 5
    time.sleep(1.1)
    assert objects.present(["hang/x"]) == {"hang/x"}
    objects.close()


def test_what_is_larger_than_the_shared_buffer_is_refused_on_both_ways(shared: Deployment) -> None:
    objects = MooncakeObjects(shared.config())
    with pytest.raises(ReplicaError) as large:
        objects.put("large/x", bytes(BUFFER_BYTES + 1))
    assert large.value.reason is Refusal.TOO_LARGE
    objects.put("large/y", os.urandom(3 << 20))
    with pytest.raises(ReplicaError) as large:
        objects.get("large/y", 1 << 20)
    assert large.value.reason is Refusal.TOO_LARGE
    found = objects.get("large/y", 4 << 20)
    assert found is not None
    assert len(found) == 3 << 20
    objects.close()


def test_an_interpreter_without_mooncake_and_a_master_that_is_not_there_are_refusals(shared: Deployment) -> None:
    import sys

    for config in (shared.config(python=Path(sys.executable)), shared.config(master="127.0.0.1:1")):
        objects = MooncakeObjects(config)
        began = time.monotonic()
        with pytest.raises(ReplicaError) as refused:
            objects.put("x", b"x")
        assert refused.value.reason in (Refusal.UNREACHABLE, Refusal.SLOW)
        assert time.monotonic() - began < 30
        objects.close()


def test_what_is_damaged_at_rest_is_never_returned(opened: Opened) -> None:
    store = opened()
    manifest = write(store, range(2))
    opened.damage(manifest.chunks[0])
    with pytest.raises(CorruptError):
        store.get_chunk(manifest.chunks[0])
    assert store.latest(SESSION) is None


def test_it_is_opened_by_its_url(shared: Deployment) -> None:
    found = python()
    [remote] = parse_remotes(f"mooncake://127.0.0.1:{shared.port}?admin=http://127.0.0.1:{shared.admin_port}")
    store = open_remote(remote, Means("node-x", 1 << 30, mooncake_python=found))
    manifest = write(store, range(2))
    assert store.latest(SESSION) == manifest
    store.finish(SESSION)
    store.close()
