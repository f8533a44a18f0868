"""Tickets: one engine gets each place, and whoever gets none is told what to do."""

import threading
from pathlib import Path

import pytest

from midstream.session.errors import ArenaError
from midstream.session.ticket import CLAIMED, TICKET, claim_ticket, claimed_epoch, worker_dir, write_ticket

PLACE = {
    "MIDSTREAM_WORKER": "w0",
    "MIDSTREAM_EPOCH": "3",
    "MIDSTREAM_HOLDER": "/h",
    "MIDSTREAM_ARENA": "/a",
    "MIDSTREAM_LOAD_TIMEOUT_S": "10",
}


def test_a_place_is_what_was_offered_and_nothing_else(tmp_path: Path) -> None:
    write_ticket(tmp_path, {**PLACE, "PYTHONPATH": "/somewhere", "SECRET": "x"})
    assert claim_ticket(tmp_path) == PLACE
    assert "SECRET" not in (tmp_path / CLAIMED).read_text()


def test_a_ticket_is_private(tmp_path: Path) -> None:
    write_ticket(tmp_path, PLACE)
    assert (tmp_path / TICKET).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [TICKET]


def test_a_place_is_taken_once(tmp_path: Path) -> None:
    write_ticket(tmp_path, PLACE)
    claim_ticket(tmp_path)
    with pytest.raises(ArenaError, match="start `midstream serve` with a worker of this name first"):
        claim_ticket(tmp_path)


def test_of_many_engines_that_start_at_once_one_gets_the_place(tmp_path: Path) -> None:
    write_ticket(tmp_path, PLACE)
    got: list[object] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        try:
            got.append(claim_ticket(tmp_path))
        except ArenaError as error:
            got.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got.count(PLACE) == 1
    assert len(got) == 8


def test_a_later_offer_replaces_one_that_nobody_took(tmp_path: Path) -> None:
    write_ticket(tmp_path, PLACE)
    write_ticket(tmp_path, {**PLACE, "MIDSTREAM_EPOCH": "4"})
    assert claim_ticket(tmp_path)["MIDSTREAM_EPOCH"] == "4"
    assert claimed_epoch(tmp_path) == 4


def test_an_offer_leaves_the_claim_before_it_alone(tmp_path: Path) -> None:
    write_ticket(tmp_path, PLACE)
    claim_ticket(tmp_path)
    write_ticket(tmp_path, {**PLACE, "MIDSTREAM_EPOCH": "4"})
    assert claimed_epoch(tmp_path) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '"w0"', "7", "null", b"\xff\xfe\x00".decode("latin-1")])
def test_a_ticket_that_cannot_be_read_is_an_error_that_names_its_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / TICKET).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArenaError, match=str(tmp_path)):
        claim_ticket(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"MIDSTREAM_EPOCH": "x"}', '{"MIDSTREAM_EPOCH": null}', "null"])
def test_a_claim_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert claimed_epoch(tmp_path) is None
    (tmp_path / CLAIMED).write_text(text)
    assert claimed_epoch(tmp_path) is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "x" * 64, "a\0"])
def test_a_worker_name_never_leaves_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="worker name"):
        worker_dir(tmp_path, name)


def test_a_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert worker_dir(tmp_path, "gpu-0.a_b") == tmp_path / "workers" / "gpu-0.a_b"
