"""What a mover notes of a fault's arenas: read by the next one, bounded, private, and never guessed."""

import os
from pathlib import Path

import pytest

from midstream.sidecar.mover import suspects as module
from midstream.sidecar.mover.protocol import MoverError, Reason
from midstream.sidecar.mover.suspects import Suspect, Suspects, suspects_beside

GPU = "GPU-00000000-0000-0000-0000-000000000001"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return suspects_beside(str(tmp_path / "mover.sock"))


def arena_at(path: Path) -> Suspect:
    path.write_bytes(b"arena")
    return Suspect(path, identity_of(path), GPU)


def identity_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def refused(suspects: Suspects, suspect: Suspect) -> bool:
    try:
        suspects.check(suspect.arena, suspect.identity)
    except MoverError as error:
        return error.reason is Reason.FAULT
    return False


def test_what_was_noted_is_refused_at_once_and_by_whoever_reads_it(path: Path, tmp_path: Path) -> None:
    one, other = arena_at(tmp_path / "one.arena"), arena_at(tmp_path / "other.arena")
    suspects = Suspects(path)
    assert not refused(suspects, one)
    suspects.add([one])
    assert refused(suspects, one)
    assert not path.exists()
    suspects.save()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path).count(path.name + ".new") == 0
    for _ in range(2):
        again = Suspects(path)
        assert (refused(again, one), refused(again, other)) == (True, False)
        with pytest.raises(MoverError, match=f"KV of {one.arena} may have been touched by the fault of {GPU}"):
            again.check(one.arena, one.identity)
    again.add([other])
    again.save()
    assert [refused(Suspects(path), each) for each in (one, other)] == [True, True]


def test_another_arena_at_the_same_path_is_none_that_was_noted(path: Path, tmp_path: Path) -> None:
    one = arena_at(tmp_path / "one.arena")
    suspects = Suspects(path)
    suspects.add([one])
    suspects.save()
    (tmp_path / "new").write_bytes(b"arena")
    (tmp_path / "new").rename(one.arena)
    assert refused(suspects, one)
    assert not refused(suspects, Suspect(one.arena, identity_of(one.arena), GPU))
    assert not refused(Suspects(path), Suspect(one.arena, identity_of(one.arena), GPU))
    assert not path.exists()


def test_notes_go_with_their_arenas_and_the_others_stay(path: Path, tmp_path: Path) -> None:
    arenas = [arena_at(tmp_path / f"{n}.arena") for n in range(3)]
    suspects = Suspects(path)
    suspects.add(arenas)
    suspects.save()
    before = path.stat().st_size
    arenas[1].arena.unlink()
    again = Suspects(path)
    assert [refused(again, arena) for arena in arenas] == [True, False, True]
    assert path.stat().st_size < before
    arenas[0].arena.unlink()
    arenas[2].arena.unlink()
    Suspects(path)
    assert not path.exists()


def test_the_newest_are_kept(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUSPECTS_MAX", 3)
    arenas = [arena_at(tmp_path / f"{n}.arena") for n in range(5)]
    suspects = Suspects(path)
    suspects.add(arenas[:4])
    # Noted once more, it is among the newest.
    suspects.add([Suspect(arenas[1].arena, arenas[1].identity, "GPU-2"), arenas[4]])
    suspects.save()
    assert [refused(Suspects(path), arena) for arena in arenas] == [False, True, False, True, True]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"v": 2, "suspects": []}',
        b'{"v": 1, "suspects": 5}',
        b'{"v": 1, "suspects": [{"arena": "/a", "identity": [1], "gpu": "x"}]}',
        b'{"v": 1, "suspects": [{"arena": "/a", "identity": ["1", "2"], "gpu": "x"}]}',
        b'{"v": 1, "suspects": [{"arena": 1, "identity": [1, 2], "gpu": "x"}]}',
        b'{"v": 1, "suspects": [{"arena": "/a", "identity": [1, 2]}]}',
        b'{"v": 1, "suspects": [{"arena": "/a\\u0000", "identity": [1, 2], "gpu": "x"}]}',
        b'{"v": 1, "suspects": [{"arena": "/\\ud800", "identity": [1, 2], "gpu": "x"}]}',
        b"\xff",
    ],
)
def test_notes_that_cannot_be_read_refuse_everything_and_are_left_as_they_are(
    path: Path, tmp_path: Path, raw: bytes
) -> None:
    one = arena_at(tmp_path / "one.arena")
    path.write_bytes(raw)
    suspects = Suspects(path)
    assert refused(suspects, one)
    suspects.add([one])
    suspects.save()
    assert path.read_bytes() == raw
    with pytest.raises(MoverError, match="remove it when all engines were started anew"):
        Suspects(path).check(one.arena, one.identity)


def test_a_link_a_folder_or_a_pipe_in_its_place_refuses_everything(path: Path, tmp_path: Path) -> None:
    one = arena_at(tmp_path / "one.arena")
    path.symlink_to(tmp_path / "nowhere")
    assert refused(Suspects(path), one)
    path.unlink()
    path.mkdir()
    assert refused(Suspects(path), one)
    path.rmdir()
    os.mkfifo(path)
    assert refused(Suspects(path), one)


def test_a_note_that_could_not_be_written_is_written_later_and_what_was_there_stays(path: Path, tmp_path: Path) -> None:
    one, other = arena_at(tmp_path / "one.arena"), arena_at(tmp_path / "other.arena")
    suspects = Suspects(path)
    suspects.add([one])
    suspects.save()
    before = path.read_bytes()
    in_the_way = Path(f"{path}.new")
    in_the_way.mkdir()
    suspects.add([other])
    with pytest.raises(OSError, match="directory"):
        suspects.save()
    assert path.read_bytes() == before
    assert refused(suspects, other)
    in_the_way.rmdir()
    # As a mover leaves it that was killed while it wrote.
    in_the_way.write_bytes(b"half of")
    suspects.save()
    assert refused(Suspects(path), other)
    assert not in_the_way.exists()


def test_what_is_added_while_others_are_saved_is_saved_after_them(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = arena_at(tmp_path / "one.arena"), arena_at(tmp_path / "other.arena")
    suspects = Suspects(path)
    suspects.add([one])
    rename = os.rename

    def add_and_rename(old: str, new: Path) -> None:
        suspects.add([other])
        rename(old, new)

    monkeypatch.setattr(os, "rename", add_and_rename)
    suspects.save()
    assert [refused(Suspects(path), each) for each in (one, other)] == [True, False]
    suspects.save()
    assert [refused(Suspects(path), each) for each in (one, other)] == [True, True]
