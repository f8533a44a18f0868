"""What a store on disk tells of itself to who brings its snapshots elsewhere."""

import time
from pathlib import Path

import pytest
from contracts.store_suite import OTHER, SESSION, block, write

from midstream.session import chunk
from midstream.session.disk_store import DiskStore
from midstream.session.errors import CorruptError, StoreError
from midstream.sidecar.replicas.process import OwnStore


def test_the_latest_of_each_session_is_told_by_names_alone(tmp_path: Path) -> None:
    store, own = DiskStore(tmp_path / "s"), OwnStore(tmp_path / "s")
    assert own.heads() == []
    write(store, range(2), created_at=1000.0)
    write(store, range(3), created_at=2000.5)
    write(store, range(1), OTHER, generation=7)
    store.finish(OTHER)
    told = {head.session: (head.generation, head.kv_len, head.created_at, head.finished) for head in own.heads()}
    assert told == {SESSION: (1, 12, 2000.5, False), OTHER: (7, 4, 1000.0, True)}
    store.delete(SESSION)
    assert [head.session for head in own.heads()] == [OTHER]
    store.close()


def test_stored_bytes_are_proven_as_they_leave(tmp_path: Path) -> None:
    store, own = DiskStore(tmp_path / "s"), OwnStore(tmp_path / "s")
    manifest = write(store, range(2))
    name = manifest.chunks[0]
    assert own.get_stored(name) == chunk.encode(block(0))[1]
    path = tmp_path / "s" / "chunks" / name[:2] / name
    stored = path.read_bytes()
    for at in (0, 10, 45, 50, len(stored) - 1):
        path.write_bytes(stored[:at] + bytes([stored[at] ^ 2]) + stored[at + 1 :])
        with pytest.raises(CorruptError):
            own.get_stored(name)
    # Who only reads removes nothing.
    assert path.exists()
    with pytest.raises(StoreError):
        own.get_stored("0" * 32)
    with pytest.raises(StoreError):
        own.get_stored("../../etc/passwd")
    store.close()


def test_a_store_that_nobody_has_made_yet_is_an_error_and_found_when_it_is_there(tmp_path: Path) -> None:
    own = OwnStore(tmp_path / "s")
    with pytest.raises(StoreError):
        own.heads()
    store = DiskStore(tmp_path / "s")
    write(store, range(1))
    assert len(own.heads()) == 1
    assert OwnStore(None).heads() == ()
    store.close()


def test_many_sessions_are_looked_through_quickly(tmp_path: Path) -> None:
    store, own = DiskStore(tmp_path / "s"), OwnStore(tmp_path / "s")
    folder = tmp_path / "s" / "sessions"
    for number in range(2000):
        session = folder / f"{number:032x}"
        session.mkdir()
        (session / f"{1:010d}-{100:010d}-{0:017d}").touch()
    began = time.process_time()
    assert len(own.heads()) == 2000
    assert time.process_time() - began < 1.0
    store.close()
