"""What every store must do (session/store.py). A store's test module inherits StoreContract and gives it stores."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.session.store import Draft, Store

SESSION = SessionId("5" * 32)
OTHER = SessionId("6" * 32)
BLOCK_TOKENS = 4


def block(number: int, size_bytes: int = 2000) -> bytes:
    """A block's bytes, a different one for each number."""
    return bytes((number * 31 + i * i) % 251 for i in range(size_bytes))


def snapshot_of(chunks: tuple[str, ...], session: SessionId = SESSION, **changes: Any) -> Manifest:
    """A manifest whose blocks are all full."""
    kv_len = BLOCK_TOKENS * len(chunks)
    facts = Manifest(
        session=session,
        generation=1,
        key={"model": "m"},
        fingerprint="f" * 32,
        block_tokens=BLOCK_TOKENS,
        block_bytes=2000,
        prompt_len=3,
        prompt_hash="a" * 32,
        kv_len=kv_len,
        outputs=tuple(range(kv_len - 2)),
        chunks=chunks,
        created_at=1000.0,
    )
    return replace(facts, **changes)


def write(store: Store, numbers: range, session: SessionId = SESSION, **changes: Any) -> Manifest:
    """Store a snapshot of numbered blocks."""
    with store.begin() as draft:
        manifest = snapshot_of(tuple(draft.put_chunk(block(n)) for n in numbers), session, **changes)
        draft.publish(manifest)
    return manifest


class StoreContract:
    """Inherit, and define the fixtures `store`, `reopen` (the same store after a restart) and `damage`.

    `damage(name)` changes the stored bytes of a chunk; `damage(name, gone=True)` takes them away.
    """

    def test_a_snapshot_comes_back_bit_for_bit(self, store: Store) -> None:
        manifest = write(store, range(8))
        assert store.latest(SESSION) == manifest
        assert [store.get_chunk(name) for name in manifest.chunks] == [block(n) for n in range(8)]

    def test_an_unknown_session_or_chunk_is_no_surprise(self, store: Store) -> None:
        assert store.latest(SESSION) is None
        assert store.delete(SESSION) == 0
        store.finish(SESSION)
        with pytest.raises(StoreError):
            store.get_chunk("0" * 32)
        with pytest.raises(StoreError):
            store.get_chunk("../../../etc/passwd")

    def test_what_is_not_published_does_not_exist(self, store: Store, reopen: Callable[[], Store]) -> None:
        with store.begin() as draft:
            names = [draft.put_chunk(block(n)) for n in range(3)]
            assert store.latest(SESSION) is None
            assert list(store.list()) == []
        for name in names:
            with pytest.raises(StoreError):
                store.get_chunk(name)
        assert store.figures().size_bytes == 0
        assert reopen().latest(SESSION) is None

    def test_a_snapshot_without_all_its_chunks_cannot_be_published(
        self, store: Store, damage: Callable[..., None]
    ) -> None:
        with store.begin() as draft:
            names = tuple(draft.put_chunk(block(n)) for n in range(2))
            with pytest.raises(StoreError):
                draft.publish(snapshot_of((*names, "0" * 32)))
            damage(names[1], gone=True)
            with pytest.raises(StoreError):
                draft.publish(snapshot_of(names))
        assert store.latest(SESSION) is None

    def test_a_published_snapshot_outlives_a_restart(self, store: Store, reopen: Callable[[], Store]) -> None:
        manifest = write(store, range(3))
        size = store.figures().size_bytes
        again = reopen()
        assert again.latest(SESSION) == manifest
        assert again.get_chunk(manifest.chunks[2]) == block(2)
        assert again.figures().size_bytes == size

    def test_the_newest_generation_then_the_longest_snapshot_is_the_latest(self, store: Store) -> None:
        write(store, range(4), generation=2, created_at=2000.0)
        write(store, range(5), generation=2, created_at=1500.0)
        write(store, range(6), generation=1, created_at=3000.0)
        found = store.latest(SESSION)
        assert found is not None
        assert (found.generation, found.kv_len) == (2, 20)

    def test_blocks_that_are_stored_already_are_kept_and_not_written_again(self, store: Store) -> None:
        first = write(store, range(3))
        size = store.figures().size_bytes
        with store.begin() as draft:
            assert all(draft.keep(name) for name in first.chunks)
            assert draft.put_chunk(block(1)) == first.chunks[1]
            assert not draft.keep("0" * 32)
            assert store.figures().size_bytes == size
            draft.publish(replace(snapshot_of(first.chunks), created_at=2000.0))
        assert store.get_chunk(first.chunks[0]) == block(0)

    def test_sessions_share_a_block_until_the_last_of_them_is_gone(self, store: Store) -> None:
        mine = write(store, range(3))
        theirs = write(store, range(2, 5), OTHER)
        assert store.delete(SESSION) == 1
        store.sweep()
        assert store.get_chunk(theirs.chunks[0]) == block(2)
        with pytest.raises(StoreError):
            store.get_chunk(mine.chunks[0])
        store.delete(OTHER)
        store.sweep()
        assert store.figures().size_bytes == 0
        assert list(store.list()) == []

    def test_a_sweep_takes_nothing_that_a_draft_needs(self, store: Store) -> None:
        old = write(store, range(2))
        with store.begin() as draft:
            fresh = draft.put_chunk(block(7))
            assert draft.keep(old.chunks[0])
            store.delete(SESSION)
            store.sweep()
            assert store.get_chunk(fresh) == block(7)
            draft.publish(snapshot_of((old.chunks[0], fresh)))
        assert store.get_chunk(old.chunks[0]) == block(0)
        with pytest.raises(StoreError):
            store.get_chunk(old.chunks[1])

    def test_a_damaged_block_is_noticed_and_the_next_snapshot_mends_it(
        self, store: Store, damage: Callable[..., None]
    ) -> None:
        manifest = write(store, range(3))
        damage(manifest.chunks[1])
        with pytest.raises(CorruptError):
            store.get_chunk(manifest.chunks[1])
        assert store.get_chunk(manifest.chunks[0]) == block(0)
        assert store.figures().corrupt == 1
        write(store, range(3), created_at=2000.0)
        assert store.get_chunk(manifest.chunks[1]) == block(1)

    def test_a_block_that_is_gone_between_look_up_and_read_is_an_error_and_no_crash(
        self, store: Store, damage: Callable[..., None]
    ) -> None:
        manifest = write(store, range(3))
        found = store.latest(SESSION)
        assert found == manifest
        damage(manifest.chunks[2], gone=True)
        with pytest.raises(StoreError):
            store.get_chunk(manifest.chunks[2])
        assert store.get_chunk(manifest.chunks[0]) == block(0)

    def test_the_list_says_which_snapshot_counts(self, store: Store) -> None:
        write(store, range(2), created_at=1000.0)
        write(store, range(3), created_at=2000.0)
        write(store, range(1), OTHER, created_at=1500.0)
        store.finish(OTHER)
        lines = store.list()
        assert [(line.session, line.kv_len, line.latest, line.finished) for line in lines] == [
            (SESSION, 8, False, False),
            (OTHER, 4, True, True),
            (SESSION, 12, True, False),
        ]
        assert all(line.size_bytes > 0 for line in lines)

    def test_a_reader_beside_a_writer_always_finds_a_whole_snapshot(self, store: Store) -> None:
        write(store, range(1))
        stop = threading.Event()
        wrong: list[str] = []
        reads = 0

        def read() -> None:
            nonlocal reads
            while not stop.is_set() or not reads:
                found = store.latest(SESSION)
                reads += 1
                if found is None or found.kv_len != BLOCK_TOKENS * len(found.chunks):
                    wrong.append(f"{found}")
                elif store.get_chunk(found.chunks[0]) != block(0):
                    wrong.append("bytes")

        reader = threading.Thread(target=read)
        reader.start()
        for count in range(2, 30):
            write(store, range(count), created_at=1000.0 + count)
        stop.set()
        reader.join(30)
        assert not wrong
        assert reads > 0

    def test_drafts_at_the_same_time_do_not_disturb_each_other(self, store: Store) -> None:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            session = SessionId(f"{number:032x}")
            try:
                for round_ in range(5):
                    write(store, range(number, number + 4), session, created_at=1000.0 + round_)
                    store.sweep()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        for number in range(4):
            found = store.latest(SessionId(f"{number:032x}"))
            assert found is not None
            assert [store.get_chunk(name) for name in found.chunks] == [block(n) for n in range(number, number + 4)]

    def test_a_draft_that_was_left_can_no_longer_hold_anything(self, store: Store) -> None:
        draft: Draft
        with store.begin() as draft:
            name = draft.put_chunk(block(1))
        with pytest.raises(StoreError):
            draft.publish(snapshot_of((name,)))
