"""The record of a parked group: whole or not there, one keeper at a time, and gone when it is of no use."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.adapters.cuda_checkpoint.machine import ParkState
from midstream.session.errors import ParkError
from midstream.sidecar.parking.journal import Entry, Journal, ParkedRank
from midstream.sidecar.processes import read_process


def entry(name: str = "w0", *ranks: ParkedRank) -> Entry:
    own = read_process(os.getpid())
    assert own is not None
    there = ranks or (ParkedRank(own.pid, own.started, {"GPU-0": 5}),)
    return Entry(name, ParkState.PARKED, there, 12.5, {"GPU-0": "GPU-1"}, {"answer": [1, 2]}, 1, "why")


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert (journal.names(), journal.read("w0")) == ([], None)
    journal.write(entry())
    assert journal.read("w0") == entry()
    assert journal.names() == ["w0"]
    path = tmp_path / "parked" / "w0.json"
    assert path.stat().st_mode & 0o777 == 0o600
    journal.forget("w0")
    assert journal.names() == []


def test_a_record_that_was_cut_off_at_any_byte_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(entry())
    path = tmp_path / "parked" / "w0.json"
    whole = path.read_bytes()
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ParkError, match=r"w0\.json.*remove"):
            journal.read("w0")
    assert list(journal.entries()) == []


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"state": "odd"}, {"ranks": []}, {"ranks": [{}]}, {"name": "../x"}, {"map": 3}, {"since": None}],
)
def test_a_record_with_another_meaning_is_refused_never_guessed(tmp_path: Path, change: dict[str, object]) -> None:
    raw = {**json.loads(entry().to_json()), **change}
    with pytest.raises(ParkError):
        Entry.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65, "é", "-x"])
def test_a_name_that_could_lead_elsewhere_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ParkError):
        Journal(tmp_path).read(name)


async def test_a_group_has_one_keeper_also_when_the_lock_is_removed_meanwhile(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fd = await journal.lock("w0", 1)
    with pytest.raises(ParkError, match="somebody else works on it"):
        await journal.lock("w0", 0.1)
    waiting = asyncio.create_task(journal.lock("w0", 5))
    await asyncio.sleep(0.1)
    (tmp_path / "parked" / "w0.lock").unlink()
    os.close(fd)
    second = await waiting
    with pytest.raises(ParkError):
        await journal.lock("w0", 0.1)
    os.close(second)


async def test_a_helper_that_lives_on_holds_the_lock_of_its_keeper(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fd = await journal.lock("w0", 1)
    helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(fd,))  # noqa: ASYNC220
    os.close(fd)
    with pytest.raises(ParkError):
        await journal.lock("w0", 0.2)
    helper.kill()
    await asyncio.to_thread(helper.communicate)
    os.close(await journal.lock("w0", 1))


async def test_what_is_of_no_use_goes_and_what_is_parked_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220
    ended.wait()
    for name, ranks in (("here", ()), ("gone", (ParkedRank(ended.pid, 1),))):
        os.close(await journal.lock(name, 1))
        journal.write(entry(name, *ranks))
    os.close(await journal.lock("nothing", 1))
    journal.tidy()
    assert sorted(path.name for path in journal.folder.iterdir()) == ["here.json", "here.lock"]
    journal.forget("here")
    journal.tidy()
    assert not journal.folder.exists()
