"""A courier between a real store on disk and stores that fail, fill up, lag and lose things."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.store_suite import OTHER, SESSION, block, snapshot_of, write

from midstream.session import chunk
from midstream.session.disk_store import DiskStore
from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.sidecar.replicas import courier as couriers
from midstream.sidecar.replicas.budget import Budget
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.courier import Courier
from midstream.sidecar.replicas.memory_objects import MemoryObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.process import OwnStore

FAST = 10**12


class Remote(MemoryObjects):
    """Objects that count what they are sent, and fail when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: ReplicaError | None = None
        self.puts: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.before_put: Callable[[str], None] = lambda name: None

    def put(self, name: str, content: bytes) -> None:
        self.hold.wait(20)
        self._check()
        self.before_put(name)
        self.puts.append(name.rpartition("/")[2])
        MemoryObjects.replace(self, name, content)

    def replace(self, name: str, content: bytes) -> None:
        self._check()
        MemoryObjects.replace(self, name, content)

    def present(self, names):  # type: ignore[no-untyped-def]
        self._check()
        return super().present(names)

    def list(self, prefix: str, count_max: int):  # type: ignore[no-untyped-def]
        self._check()
        return super().list(prefix, count_max)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class Rig:
    """A store on disk, a courier that runs, and what it brings things to."""

    def __init__(self, folder: Path, bytes_per_s: int = FAST) -> None:
        self.disk = DiskStore(folder)
        self.remote = Remote()
        self.budget = Budget(bytes_per_s)
        self.courier = Courier("there", self.open, OwnStore(folder), self.budget, recheck_s=0.3, wall=lambda: 1500.0)
        self.thread = threading.Thread(target=self.courier.run)

    def open(self) -> ObjectStore:
        return ObjectStore(self.remote, Names("", "node"), bytes_max=1 << 30)

    def start(self) -> None:
        self.thread.start()

    def there(self, session: SessionId = SESSION) -> int:
        try:
            found = self.open().latest(session)
        except StoreError:
            return -1
        return 0 if found is None else found.kv_len

    def until(self, condition: Callable[[], object], within_s: float = 15) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.courier.status()
            time.sleep(0.02)

    def close(self) -> None:
        self.remote.hold.set()
        self.courier.stop()
        if self.thread.ident is not None:
            self.thread.join(20)
        assert not self.thread.is_alive()
        self.disk.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(couriers, "ROUND_S", 0.02)
    monkeypatch.setattr(couriers, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(couriers, "RETRY_LARGEST_S", 0.2)
    rig = Rig(tmp_path / "store")
    yield rig
    rig.close()


def random_snapshot(store: DiskStore, session: SessionId, size_bytes: int, **changes: object) -> tuple[str, ...]:
    with store.begin() as draft:
        names = (draft.put_chunk(os.urandom(size_bytes)),)
        draft.publish(snapshot_of(names, session, **changes))
    return names


def test_what_is_stored_here_comes_to_be_there_and_no_block_is_sent_twice(rig: Rig) -> None:
    rig.start()
    write(rig.disk, range(4))
    rig.until(lambda: rig.there() == 16)
    write(rig.disk, range(7), created_at=2000.0)
    rig.until(lambda: rig.there() == 28)
    write(rig.disk, range(2, 9), OTHER)
    rig.until(lambda: rig.there(OTHER) == 28)
    assert sorted(rig.remote.puts) == sorted({chunk.chunk_name(block(n)) for n in range(9)})
    found = rig.open().latest(OTHER)
    assert found is not None
    assert [rig.open().get_chunk(name) for name in found.chunks] == [block(n) for n in range(2, 9)]


def test_a_store_that_is_down_costs_lag_and_is_brought_everything_when_it_is_up(rig: Rig) -> None:
    rig.remote.error = ReplicaError(Refusal.UNREACHABLE, "down")
    rig.start()
    for count in range(1, 6):
        write(rig.disk, range(count), created_at=1000.0 + count)
    rig.until(lambda: rig.courier.status()["failures_unreachable"] >= 3)
    rig.until(lambda: rig.courier.status()["lag_tokens"] == 20)
    status = rig.courier.status()
    assert (status["up"], status["sessions_behind"]) == (0, 1)
    assert status["lag_seconds_max"] > 0
    rig.remote.error = None
    rig.until(lambda: rig.there() == 20)
    rig.until(lambda: rig.courier.status()["lag_tokens"] == 0)
    # Only the latest: what was superseded meanwhile is never sent.
    assert rig.courier.status()["snapshots_sent"] == 1


def test_pauses_grow_while_a_store_is_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.remote.error = ReplicaError(Refusal.UNREACHABLE, "down")
    rig.start()
    write(rig.disk, range(1))
    time.sleep(1.5)
    # 0.05 + 0.1 + 0.2 + 0.2 ... : at most so many, and not hundreds.
    assert 4 <= rig.courier.status()["failures_unreachable"] <= 20


def test_what_a_store_has_lost_is_found_out_and_sent_again(rig: Rig) -> None:
    rig.start()
    manifest = write(rig.disk, range(3))
    rig.until(lambda: rig.there() == 12)
    rig.remote.remove([f"chunks/node/{manifest.chunks[1]}"])
    assert rig.there() == 0
    rig.until(lambda: rig.there() == 12)
    assert rig.remote.puts.count(manifest.chunks[1]) == 2
    assert rig.remote.puts.count(manifest.chunks[0]) == 1


def test_a_session_that_is_refused_for_itself_holds_up_no_other(rig: Rig) -> None:
    def refuse(name: str) -> None:
        if name.endswith(large):
            raise ReplicaError(Refusal.TOO_LARGE, "too large")

    [large] = random_snapshot(rig.disk, OTHER, 5000)
    rig.remote.before_put = refuse
    rig.start()
    write(rig.disk, range(4))
    rig.until(lambda: rig.there() == 16)
    rig.until(lambda: rig.courier.status()["failures_too_large"] >= 1)
    time.sleep(0.3)
    status = rig.courier.status()
    assert (status["up"], status["failures_too_large"]) == (1, 1)
    assert rig.there(OTHER) == 0


class Unreadable(ObjectStore):
    """Of one session nothing that is there can be read, once it is told so."""

    of: SessionId | None = None

    def latest(self, session: SessionId) -> Manifest | None:
        if session == self.of:
            raise CorruptError(f"manifest of session {session}: damaged")
        return super().latest(session)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_session_that_cannot_be_read_there_holds_up_no_other(rig: Rig, is_over: bool) -> None:
    made = Unreadable(rig.remote, Names("", "node"), bytes_max=1 << 30)
    rig.courier._open_store = lambda: made
    write(rig.disk, range(2), OTHER)
    rig.start()
    rig.until(lambda: rig.there(OTHER) == 8)
    made.of = OTHER
    if is_over:
        rig.disk.finish(OTHER)
    rig.until(lambda: rig.courier.status()["failures_corrupt"] == 1)
    write(rig.disk, range(4))
    rig.until(lambda: rig.there() == 16)
    time.sleep(0.4)
    status = rig.courier.status()
    # It is left aside for longer than this takes, and what is there of others is not asked for anew.
    assert (status["up"], status["failures_corrupt"], status["snapshots_sent"]) == (1, 1, 2)


def test_a_session_that_nobody_has_heard_of_for_long_is_not_sent(rig: Rig) -> None:
    write(rig.disk, range(4), OTHER, created_at=899.0)
    rig.start()
    write(rig.disk, range(2), created_at=901.0)
    rig.until(lambda: rig.there() == 8)
    time.sleep(0.3)
    assert rig.there(OTHER) == 0
    assert rig.courier.status()["lag_tokens"] == 0


def test_a_session_that_takes_long_holds_up_no_other(rig: Rig) -> None:
    going_on = threading.Event()
    [slow] = random_snapshot(rig.disk, OTHER, 5000)
    rig.remote.before_put = lambda name: going_on.wait(20) if name.endswith(slow) else None  # type: ignore[assignment]
    rig.start()
    write(rig.disk, range(4))
    rig.until(lambda: rig.there() == 16)
    write(rig.disk, range(6), created_at=2000.0)
    rig.until(lambda: rig.there() == 24)
    assert rig.there(OTHER) == 0
    going_on.set()
    rig.until(lambda: rig.there(OTHER) == 4)


def test_a_full_store_is_said_and_tried_again(rig: Rig) -> None:
    rig.remote.before_put = lambda name: (_ for _ in ()).throw(ReplicaError(Refusal.FULL, "full"))
    rig.start()
    write(rig.disk, range(2))
    rig.until(lambda: rig.courier.status()["failures_full"] >= 2)
    # It is no reason to think that what is there was lost.
    assert rig.courier.status()["up"] == 1
    rig.remote.before_put = lambda name: None
    rig.until(lambda: rig.there() == 8)


def test_a_snapshot_that_is_replaced_while_it_is_sent_goes_on_as_the_newer_one(rig: Rig) -> None:
    write(rig.disk, range(6))
    rig.remote.hold.clear()
    rig.start()
    time.sleep(0.3)
    # Two newer ones: the first, and with it a tail that nobody else has, is gone from this disk.
    for count in (7, 8):
        with rig.disk.begin() as draft:
            names = tuple(draft.put_chunk(block(n)) for n in (*range(5), *range(100, 100 + count)))
            draft.publish(snapshot_of(names, created_at=1000.0 + count))
    rig.remote.hold.set()
    rig.until(lambda: rig.there() == 4 * 13)
    found = rig.open().latest(SESSION)
    assert found is not None
    assert rig.open().get_chunk(found.chunks[-1]) == block(107)


def test_sending_takes_no_more_of_the_network_than_its_share(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", bytes_per_s=200_000)
    try:
        for number in range(8):
            random_snapshot(rig.disk, SessionId(f"{number + 1:032x}"), 50_000)
        began = time.monotonic()
        rig.start()
        rig.until(lambda: rig.courier.status()["snapshots_sent"] == 8)
        took_s = time.monotonic() - began
        assert rig.courier.status()["bytes_sent"] / (took_s + 0.1 + 50_000 / 200_000) <= 200_000
        assert took_s > 1.5
    finally:
        rig.close()


def test_one_that_waits_for_its_share_ends_at_once_when_told_to(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", bytes_per_s=1000)
    for number in range(4):
        random_snapshot(rig.disk, SessionId(f"{number + 1:032x}"), 500_000)
    rig.start()
    time.sleep(0.5)
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < 5


def test_without_a_store_here_nothing_is_sent_and_nothing_fails(tmp_path: Path) -> None:
    remote = Remote()
    courier = Courier(
        "there", lambda: ObjectStore(remote, Names("", "n"), bytes_max=1), OwnStore(tmp_path / "none"), Budget(FAST)
    )
    thread = threading.Thread(target=courier.run)
    thread.start()
    time.sleep(0.4)
    assert courier.status()["up"] == 1
    assert courier.status()["failures_internal"] == 0
    courier.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_the_end_of_a_session_is_told_unless_another_node_has_it_by_now(rig: Rig) -> None:
    rig.start()
    write(rig.disk, range(2))
    write(rig.disk, range(2), OTHER)
    rig.until(lambda: rig.there() == 8 and rig.there(OTHER) == 8)
    # The other one went on elsewhere, under the same names in a peer's memory.
    write(rig.open(), range(3), OTHER, generation=2)
    rig.disk.finish(SESSION)
    rig.disk.finish(OTHER)

    def finished() -> dict[SessionId, bool]:
        return {line.session: line.finished for line in rig.open().list() if line.latest}

    rig.until(lambda: finished()[SESSION])
    time.sleep(0.2)
    assert not finished()[OTHER]
