"""Lifelines with real processes: the kernel marks them at the beginning of a death, and never otherwise."""

import mmap
import os
import signal
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.session import futex, lifeline
from midstream.session.errors import LifelineError
from midstream.session.lifeline import CELL_COUNT, FILE_BYTES, Hold, LifelineFile, create_lifeline, hold_lifeline
from support.lifelines import SLEEP, PidfdClock, all_ended, ended


@pytest.fixture
def path(tmp_path: Path) -> Path:
    created = lifeline.lifeline_of(tmp_path / "1.arena")
    create_lifeline(created)
    return created


@pytest.fixture
def file(path: Path) -> Iterator[LifelineFile]:
    opened = LifelineFile(path)
    yield opened
    opened.close()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with all_ended() as starting:
        yield starting


def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def holds(file: LifelineFile) -> list[Hold]:
    return [hold for hold, _, _ in file.look()]


def held(file: LifelineFile, count: int = 1) -> None:
    until(lambda: holds(file) == [Hold.HELD] * count)


def test_the_file_is_for_its_owner_alone_and_empty(path: Path, file: LifelineFile) -> None:
    assert path.name == "1.lifeline"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == FILE_BYTES
    assert holds(file) == []


def test_a_cell_is_held_while_its_process_lives_and_broken_when_it_is_killed(
    path: Path, file: LifelineFile, start: Start
) -> None:
    popen = start(path)
    held(file)
    address = file.look()[0][1]
    assert file.holder(address).text == f"process core (pid {popen.pid})"
    time.sleep(0.05)
    assert holds(file) == [Hold.HELD]
    assert ended(popen) == -signal.SIGKILL
    assert holds(file) == [Hold.BROKEN]
    assert file.holder(address).pid == popen.pid


@pytest.mark.parametrize(
    "end",
    [
        "print('up', flush=True); time.sleep(0.3)",
        "print('up', flush=True); time.sleep(0.3); raise SystemExit(3)",
        "print('up', flush=True); time.sleep(0.3); sys.stderr = None; raise ValueError('the main thread')",
        "print('up', flush=True); time.sleep(0.3); os._exit(0)",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print('up', flush=True); time.sleep(0.3); "
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "print('up', flush=True); time.sleep(0.3); os.execv('/bin/true', ['true'])",
    ],
    ids=["the end of its program", "an exit status", "an exception", "_exit", "a fault", "another program"],
)
def test_whatever_ends_a_process_breaks_its_lifeline(path: Path, file: LifelineFile, end: str, start: Start) -> None:
    popen = start(path, end)
    held(file)
    until(lambda: holds(file) == [Hold.BROKEN])
    ended(popen)


def test_a_process_that_is_stopped_is_not_dead(path: Path, file: LifelineFile, start: Start) -> None:
    popen = start(path)
    held(file)
    os.kill(popen.pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert holds(file) == [Hold.HELD]
    ended(popen)
    assert holds(file) == [Hold.BROKEN]


def test_a_signal_that_is_handled_or_a_thread_that_ends_breaks_nothing(
    path: Path, file: LifelineFile, start: Start
) -> None:
    code = """
signal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True))
thread = threading.Thread(target=time.sleep, args=(0.01,))
thread.start()
thread.join()
print('up', flush=True)
while True:
    time.sleep(1)
"""
    popen = start(path, code)
    held(file)
    assert popen.stdout is not None
    for _ in range(20):
        os.kill(popen.pid, signal.SIGUSR1)
        assert popen.stdout.readline() == "handled\n"
    assert holds(file) == [Hold.HELD]
    ended(popen)


def test_a_forked_child_neither_keeps_a_lifeline_nor_breaks_it(path: Path, file: LifelineFile, start: Start) -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""
    popen = start(path, "time.sleep(0.3)\n" + code.replace("print(child", "print('up', child"))
    held(file)
    time.sleep(0.1)
    assert holds(file) == [Hold.HELD]
    os.kill(popen.pid, signal.SIGKILL)
    until(lambda: holds(file) == [Hold.BROKEN])


def test_a_child_may_take_a_cell_of_its_own(path: Path, file: LifelineFile, start: Start) -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
time.sleep(0.2)
child = os.fork()
hold_lifeline(Path(sys.argv[1]), "child" if child == 0 else "again", on_failure=failed)
print('up', flush=True)
time.sleep(60)
"""
    start(path, code)
    held(file, 2)
    names = {file.holder(address).name: file.holder(address).pid for _, address, _ in file.look()}
    assert names.keys() == {"core", "child"}
    os.kill(names["child"], signal.SIGKILL)
    until(lambda: sorted(holds(file)) == [Hold.BROKEN, Hold.HELD])


def test_a_death_is_told_before_the_process_s_memory_is_taken_down(tmp_path: Path, start: Start) -> None:
    touched = "memory = bytearray(1 << 30)\nfor at in range(0, 1 << 30, 4096): memory[at] = 1\n"
    for attempt in range(3):  # a machine that has other things to do may let both news come at once
        path = tmp_path / f"{attempt}.lifeline"
        create_lifeline(path)
        file = LifelineFile(path)
        popen = start(path, touched + "print('up', flush=True)\ntime.sleep(60)\n")
        held(file)
        told_s, gone_s = killed(file, popen)
        file.close()
        print(f"lifeline {1000 * told_s:.2f} ms, pidfd {1000 * gone_s:.2f} ms")
        if told_s < gone_s / 2:
            return
    raise AssertionError("the lifeline told no sooner than the pidfd")


def killed(file: LifelineFile, popen: "subprocess.Popen[str]") -> tuple[float, float]:
    """Kill a process: after how many seconds its lifeline broke, and after how many nothing of it was left."""
    (_, address, value) = file.look()[0]
    clock = PidfdClock(popen.pid)
    told: list[float] = []

    def wait_for_the_word() -> None:
        while file.look()[0][0] is Hold.HELD:
            futex.wait_any([(address, value)], 10)
        told.append(time.perf_counter())

    waiter = threading.Thread(target=wait_for_the_word)
    waiter.start()
    time.sleep(0.05)
    began_s = time.perf_counter()
    os.kill(popen.pid, signal.SIGKILL)
    gone_s = clock.gone_at()
    waiter.join()
    ended(popen)
    return told[0] - began_s, gone_s - began_s


def test_a_word_that_breaks_before_it_is_waited_for_does_not_wait(path: Path, file: LifelineFile, start: Start) -> None:
    popen = start(path)
    held(file)
    (_, address, value) = file.look()[0]
    ended(popen)
    began = time.perf_counter()
    futex.wait_any([(address, value)], 10)
    assert time.perf_counter() - began < 1


def test_a_wait_ends_in_time_when_nothing_happens(path: Path, file: LifelineFile, start: Start) -> None:
    popen = start(path)
    held(file)
    (_, address, value) = file.look()[0]
    began = time.perf_counter()
    futex.wait_any([(address, value)], 0.05)
    assert 0.045 < time.perf_counter() - began < 2
    ended(popen)


def test_each_process_gets_a_cell_and_a_broken_one_is_not_given_away(
    path: Path, file: LifelineFile, start: Start
) -> None:
    first = [start(path) for _ in range(3)]
    held(file, 3)
    ended(first[1])
    second = start(path)
    until(lambda: holds(file) == [Hold.HELD, Hold.BROKEN, Hold.HELD, Hold.HELD])
    for popen in (first[0], first[2], second):
        ended(popen)
    assert holds(file) == [Hold.BROKEN] * 4


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_is_in_the_way_is_told_and_nothing_is_raised(
    path: Path, file: LifelineFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure(where: Path) -> str:
        monkeypatch.setattr(lifeline, "_holding", None)
        told: list[LifelineError] = []
        hold_lifeline(where, "test", on_failure=told.append)
        until(lambda: bool(told))
        return str(told[0])

    assert "No such file" in failure(tmp_path / "none")
    (other := tmp_path / "other").write_bytes(bytes(FILE_BYTES))
    assert "is no lifeline" in failure(other)
    with monkeypatch.context() as patched:
        patched.setattr("platform.machine", lambda: "riscv64")
        assert "not known for riscv64" in failure(path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert "can't start new thread; raise the limit" in failure(path)
    with path.open("r+b") as full:
        full.write(path.read_bytes()[:64] + b"x" * (FILE_BYTES - 64))
    assert f"all {CELL_COUNT} cells are taken" in failure(path)


@pytest.mark.parametrize("at", range(20))
def test_a_file_that_is_no_lifeline_of_this_version_is_refused(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(LifelineError, match="lifeline"):
        LifelineFile(path)


def test_a_file_of_a_later_version_says_so(path: Path) -> None:
    header = struct.pack("<8sII", b"MIDLIFEL", 2, CELL_COUNT)
    raw = path.read_bytes()
    path.write_bytes(header + struct.pack("<I", lifeline.crc32(header)) + raw[20:])
    with pytest.raises(LifelineError, match="version 2"):
        LifelineFile(path)


def test_a_file_that_was_cut_short_is_refused_and_not_mapped(path: Path) -> None:
    os.truncate(path, mmap.PAGESIZE // 2)
    with pytest.raises(LifelineError, match="is no lifeline"):
        LifelineFile(path)


def test_a_cell_whose_owner_cannot_be_read_is_held_all_the_same(path: Path, file: LifelineFile, start: Start) -> None:
    popen = start(path)
    held(file)
    with path.open("r+b") as raw:
        raw.seek(64 + 6)
        raw.write(b"\xff")
    assert holds(file) == [Hold.HELD]
    assert file.holder(file.look()[0][1]).name == "unknown"
    ended(popen)
    assert holds(file) == [Hold.BROKEN]


def test_a_new_file_takes_the_place_of_an_old_one_and_who_held_that_is_not_told_here(path: Path, start: Start) -> None:
    popen = start(path)
    old = LifelineFile(path)
    held(old)
    create_lifeline(path)
    new = LifelineFile(path)
    ended(popen)
    assert (holds(old), holds(new)) == ([Hold.BROKEN], [])
    old.close()
    new.close()


def test_a_place_where_no_file_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(LifelineError, match="cannot be created"):
        create_lifeline(tmp_path / "none" / "1.lifeline")


def test_holding_costs_no_time(path: Path, file: LifelineFile, start: Start) -> None:
    popen = start(path, SLEEP)
    held(file)
    before = Path(f"/proc/{popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    time.sleep(0.5)
    after = Path(f"/proc/{popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    assert after == before
    ended(popen)


def test_processes_that_take_a_cell_at_the_same_time_get_one_each(path: Path, file: LifelineFile, start: Start) -> None:
    code = "\nprint('up', flush=True)\ntime.sleep(60)\n"
    started: list[subprocess.Popen[str]] = []
    threads = [threading.Thread(target=lambda: started.append(start(path, code))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held(file, 6)
    assert {file.holder(address).pid for _, address, _ in file.look()} == {popen.pid for popen in started}
    for popen in started:
        ended(popen)
