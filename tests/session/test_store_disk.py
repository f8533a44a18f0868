"""The disk store: the contract, and what a real disk does to it."""

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contracts.store_suite import OTHER, SESSION, StoreContract, block, snapshot_of, write

from midstream.session.disk_store import DiskStore
from midstream.session.durable_files import DurableFiles
from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId


def chunk_path(root: Path, name: str) -> Path:
    return root / "chunks" / name[:2] / name


def files_under(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} - {"format", "lock"}


class FailingFiles(DurableFiles):
    """Fails as a disk does: at the write that is named, with the error that is named."""

    def __init__(self, root: Path, number: int = 0, code: int = errno.ENOSPC) -> None:
        super().__init__(root)
        self.writes = 0
        self.number = number
        self.code = code
        self.synced: list[Path] = []
        self.synced_at: dict[Path, list[Path]] = {}

    def write(self, path: Path, content: bytes) -> None:
        self.writes += 1
        if self.writes == self.number:
            raise OSError(self.code, os.strerror(self.code))
        self.synced_at[path] = list(self.synced)
        super().write(path, content)

    def sync_folder(self, path: Path) -> None:
        self.synced.append(path)
        super().sync_folder(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened() -> Iterator[list[DiskStore]]:
    stores: list[DiskStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def store(root: Path, opened: list[DiskStore]) -> DiskStore:
    opened.append(DiskStore(root))
    return opened[-1]


class TestDiskStore(StoreContract):
    @pytest.fixture
    def reopen(self, root: Path, opened: list[DiskStore]) -> Callable[[], DiskStore]:
        def again() -> DiskStore:
            opened[-1].close()
            opened.append(DiskStore(root))
            return opened[-1]

        return again

    @pytest.fixture
    def damage(self, root: Path) -> Callable[..., None]:
        def change(name: str, gone: bool = False) -> None:
            path = chunk_path(root, name)
            if gone:
                path.unlink()
            else:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)

        return change


@pytest.mark.parametrize("number", range(1, 10))
def test_a_write_that_fails_anywhere_leaves_the_older_snapshot_and_nothing_else(
    root: Path, opened: list[DiskStore], number: int
) -> None:
    opened.append(DiskStore(root))
    old = write(opened[-1], range(100, 102))
    before = files_under(root)
    opened[-1].close()
    files = FailingFiles(root, number)
    opened.append(DiskStore(root, files=files))
    with pytest.raises(StoreError, match="No space left on device; check the folder"):
        write(opened[-1], range(8), created_at=2000.0)
    assert files.writes == number
    assert opened[-1].latest(SESSION) == old
    assert files_under(root) == before
    assert opened[-1].figures().errors == 1
    new = write(opened[-1], range(8), created_at=2000.0)
    assert opened[-1].latest(SESSION) == new


def test_chunks_are_on_stable_storage_before_their_manifest_can_be_seen(root: Path, opened: list[DiskStore]) -> None:
    files = FailingFiles(root)
    opened.append(DiskStore(root, files=files))
    files.synced.clear()
    manifest = write(opened[-1], range(8))
    (path,) = (root / "sessions" / SESSION).iterdir()
    assert {chunk_path(root, name).parent for name in manifest.chunks} <= set(files.synced_at[path])
    assert path.parent in files.synced


def test_a_writer_that_was_killed_at_any_moment_leaves_whole_snapshots_only(root: Path) -> None:
    program = """
import sys
from pathlib import Path
from contracts.store_suite import write
from midstream.session.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]))
print("open", flush=True)
for n in range(1, 10000):
    write(store, range(n, n + 8), created_at=1000.0 + n)
    print(n, flush=True)
"""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(root)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(6):
            assert process.stdout.readline()
        process.kill()
        process.communicate()
        store = DiskStore(root)
        found = store.latest(SESSION)
        assert found is not None
        number = round(found.created_at - 1000)
        assert number >= 1
        assert [store.get_chunk(name) for name in found.chunks] == [block(n) for n in range(number, number + 8)]
        assert list((root / "tmp").iterdir()) == []
        store.sweep()
        kept = {name for line in store.list() for name in [line.snapshot]}
        assert len(kept) <= 2
        store.delete(SESSION)
        store.sweep()
        assert files_under(root) == set()
        store.close()


def test_a_manifest_cut_anywhere_or_with_any_byte_flipped_is_passed_over(store: DiskStore, root: Path) -> None:
    old = write(store, range(2), created_at=1000.0)
    write(store, range(3), created_at=2000.0)
    path = sorted((root / "sessions" / SESSION).iterdir())[-1]
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert store.latest(SESSION) == old
        path.write_bytes(content[:position])
        assert store.latest(SESSION) == old
    assert store.figures().corrupt == 2 * len(content)


def test_a_chunk_cut_in_half_or_with_any_byte_flipped_is_noticed(store: DiskStore, root: Path) -> None:
    name = write(store, range(1)).chunks[0]
    path = chunk_path(root, name)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            store.get_chunk(name)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError):
        store.get_chunk(name)
    path.write_bytes(content)
    assert store.get_chunk(name) == block(0)


def test_links_and_foreign_files_in_the_folder_are_not_followed(store: DiskStore, root: Path, tmp_path: Path) -> None:
    manifest = write(store, range(2))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = chunk_path(root, manifest.chunks[0])
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(StoreError):
        store.get_chunk(manifest.chunks[0])
    (root / "sessions" / "README").write_text("hello")
    (root / "sessions" / SESSION / "notes").write_text("hello")
    assert store.latest(SESSION) == manifest
    assert len(store.list()) == 1


def test_everything_is_for_its_user_only(store: DiskStore, root: Path) -> None:
    write(store, range(2))
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_second_writer_is_refused_and_a_reader_is_not(store: DiskStore, root: Path) -> None:
    manifest = write(store, range(2))
    with pytest.raises(StoreError, match="another process writes it"):
        DiskStore(root)
    reader = DiskStore(root, write=False)
    assert reader.latest(SESSION) == manifest
    assert reader.get_chunk(manifest.chunks[0]) == block(0)
    with pytest.raises(StoreError, match="reading only"):
        reader.begin()


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="holds other files"):
        DiskStore(tmp_path)
    with pytest.raises(StoreError, match="is not a store"):
        DiskStore(tmp_path, write=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_store_of_another_version_is_refused(store: DiskStore, root: Path) -> None:
    store.close()
    (root / "format").write_text("midstream-store 2\n")
    with pytest.raises(StoreError, match="midstream-store 2"):
        DiskStore(root)


@pytest.mark.parametrize("folder", ["/proc/midstream-store", "/dev/null/store"])
def test_a_folder_that_cannot_be_written_is_one_clear_error(folder: str) -> None:
    with pytest.raises(StoreError, match=r"cannot be opened: .*check the folder, its rights and the disk"):
        DiskStore(Path(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        DiskStore(tmp_path / "store")
    tmp_path.chmod(0o700)


def test_threads_that_put_the_same_blocks_into_a_draft_write_each_once(root: Path) -> None:
    files = FailingFiles(root)
    store = DiskStore(root, files=files)
    before = files.writes
    with store.begin() as draft:
        with ThreadPoolExecutor(8) as threads:
            names = list(threads.map(draft.put_chunk, [block(n % 10) for n in range(200)]))
        assert files.writes - before == 10
        assert names == [draft.put_chunk(block(n % 10)) for n in range(200)]
        draft.publish(snapshot_of(tuple(names[:10])))
    assert store.sweep().chunks == 0
    with store.begin() as draft, ThreadPoolExecutor(8) as threads:
        list(threads.map(draft.put_chunk, [block(50 + n % 5) for n in range(100)]))
        list(threads.map(draft.keep, names))
    # What was not published is gone, each block of it, and nothing else is.
    assert store.sweep().chunks == 0
    assert len(list(root.glob("chunks/*/*"))) == 10
    assert store.figures().size_bytes == sum(path.stat().st_size for path in root.glob("[cs]*/*/*"))
    store.close()


def test_a_block_that_one_thread_could_not_write_is_written_by_the_other(root: Path) -> None:
    store = DiskStore(root, files=(files := FailingFiles(root)))
    files.number = files.writes + 1
    with store.begin() as draft, ThreadPoolExecutor(2) as threads:
        putting = [threads.submit(draft.put_chunk, block(1)) for _ in range(2)]
        errors = [one.exception() for one in putting]
        assert sorted(type(error) for error in errors if error) == [StoreError]
        [name] = [one.result() for one, error in zip(putting, errors, strict=True) if error is None]
        draft.publish(snapshot_of((name,)))
    assert store.get_chunk(name) == block(1)
    store.close()


def test_when_files_may_not_grow_the_store_says_so_and_lives(root: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from contracts.store_suite import SESSION, block, snapshot_of
from midstream.session.disk_store import DiskStore
from midstream.session.errors import StoreError
store = DiskStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
import random
for _ in range(2):
    try:
        with store.begin() as draft:
            draft.put_chunk(random.Random(1).randbytes(5000))
    except StoreError as error:
        assert "File too large" in str(error)
    else:
        raise SystemExit("no error")
assert store.figures().errors == 2 and store.figures().size_bytes == 0
print("lives")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1])),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "lives\n", done.stderr
    assert files_under(root) == set()


def session(number: int) -> SessionId:
    return SessionId(f"{number:032x}")


def test_when_full_finished_sessions_go_first_then_superseded_then_writing_stops(
    root: Path, opened: list[DiskStore]
) -> None:
    now = 1000.0
    opened.append(DiskStore(root, bytes_max=9000, clock=lambda: now))
    store = opened[-1]
    size = 0
    for number in range(100):
        write(store, range(10 * number, 10 * number + 1), session(number), created_at=now + number)
        size = size or store.figures().size_bytes
        if store.figures().size_bytes + size > 9000:
            break
    last = number
    assert last >= 5
    full = store.figures().size_bytes
    with pytest.raises(StoreError, match=r"is full .*raise its size"):
        write(store, range(5000, 5001), OTHER, created_at=now)
    assert store.figures().size_bytes == full
    assert store.figures().evicted == 0

    store.finish(session(2))
    store.finish(session(1))
    write(store, range(5000, 5001), OTHER, created_at=now)
    assert store.latest(session(1)) is None
    assert store.latest(session(2)) is not None
    assert store.latest(session(0)) is not None
    assert store.figures().size_bytes <= 9000

    now += 10_000
    for number in range(6000, 6000 + last):
        write(store, range(number, number + 1), session(number), created_at=now)
        assert store.figures().size_bytes <= 9000
    assert store.latest(session(2)) is None
    assert store.latest(session(0)) is None


def test_only_two_snapshots_of_a_session_are_kept_and_their_common_blocks_once(store: DiskStore, root: Path) -> None:
    for count in range(1, 8):
        write(store, range(count), created_at=1000.0 + count)
    assert [line.kv_len for line in store.list()] == [24, 28]
    assert len([f for f in files_under(root) if f.startswith("chunks")]) == 7


def test_a_finished_session_that_goes_on_elsewhere_is_live_again(store: DiskStore) -> None:
    write(store, range(1))
    store.finish(SESSION)
    assert store.list()[0].finished
    write(store, range(2), generation=2, created_at=2000.0)
    assert not any(line.finished for line in store.list())


def test_a_chunk_left_over_by_a_killed_writer_is_swept(store: DiskStore, root: Path, opened: list[DiskStore]) -> None:
    draft = store.begin()
    name = draft.put_chunk(block(3))
    store.close()
    opened.append(DiskStore(root))
    swept = opened[-1].sweep()
    assert swept.chunks == 1
    assert swept.size_bytes > 0
    assert not chunk_path(root, name).exists()
    assert opened[-1].figures().size_bytes == 0


def test_a_manifest_under_another_session_is_never_that_sessions(store: DiskStore, root: Path) -> None:
    write(store, range(2))
    write(store, range(4, 5), OTHER)
    (mine,) = (root / "sessions" / SESSION).iterdir()
    (root / "sessions" / OTHER / "0000000009-0000000999-00000000000000009").write_bytes(mine.read_bytes())
    found = store.latest(OTHER)
    assert found is not None
    assert found.session == OTHER
    assert snapshot_of(found.chunks, OTHER) == found


class HangingFiles(DurableFiles):
    """A disk on which nothing becomes durable until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def sync_folder(self, path: Path) -> None:
        if not self.goes_on.is_set():
            self.hangs.set()
            assert self.goes_on.wait(30)
        super().sync_folder(path)


def test_the_figures_are_told_while_the_disk_hangs(root: Path, opened: list[DiskStore]) -> None:
    files = HangingFiles(root)
    opened.append(DiskStore(root, files=files))
    files.goes_on.clear()
    writer = threading.Thread(target=write, args=(opened[-1], range(2)))
    asker = threading.Thread(target=opened[-1].figures)
    writer.start()
    try:
        assert files.hangs.wait(10)
        asker.start()
        asker.join(10)
        assert not asker.is_alive()
    finally:
        files.goes_on.set()
        writer.join(10)
    assert opened[-1].figures().snapshots == 1


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_no_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        DurableFiles(tmp_path).read(tmp_path / "pipe", 100)
