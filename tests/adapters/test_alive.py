"""Whether anything of an engine is left: with real processes, and with facts that tell less than they should."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.adapters import alive
from midstream.adapters.alive import EngineProcess, can_be_seen, front_end, parts, require_gone, told_processes
from midstream.session.errors import PoolError

# A front end that starts a core as a part of itself, as vLLM does, and tells what the core would publish.
_ENGINE = """
import json, multiprocessing, sys, time
from midstream.adapters.alive import told_processes
def core(tell):
    tell.send(told_processes())
    time.sleep(60)
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=core, args=(theirs,)).start()
    print(json.dumps(ours.recv()), flush=True)
    time.sleep(60)
"""

# Goes on in a second thread after its first has ended; the kernel then calls it a zombie.
_LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(1, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def engine() -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, Any]]]:
    process = subprocess.Popen([sys.executable, "-c", _ENGINE], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def test_a_core_that_outlives_its_front_end_keeps_the_pool(
    engine: tuple["subprocess.Popen[bytes]", dict[str, Any]],
) -> None:
    process, facts = engine
    served = front_end(facts)
    assert served is not None
    assert served.pid == process.pid
    [core] = parts(facts)
    assert core.pid != process.pid
    process.kill()
    process.wait(10)
    assert served.is_gone()
    with pytest.raises(PoolError, match=f"process {core.pid} of the engine that has it still runs"):
        require_gone(facts, 0.2)
    os.kill(core.pid, signal.SIGKILL)
    require_gone(facts, 30)


def test_the_end_is_waited_for_and_noticed_at_once(engine: tuple["subprocess.Popen[bytes]", dict[str, Any]]) -> None:
    _, facts = engine
    [core] = parts(facts)
    threading.Timer(0.3, os.kill, (core.pid, signal.SIGKILL)).start()
    began_s = time.monotonic()
    require_gone(facts, 60)
    assert 0.2 < time.monotonic() - began_s < 30


def test_a_pid_that_was_given_to_somebody_else_is_gone() -> None:
    own = told_processes()["processes"][0]
    assert EngineProcess(*own).is_gone() is False
    assert EngineProcess(own[0], own[1] - 1).is_gone()


def test_a_zombie_is_gone_though_nobody_has_collected_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        known = EngineProcess(process.pid, None)
        assert known.is_gone(30)
        assert os.path.exists(f"/proc/{process.pid}")
    finally:
        process.wait(10)


def test_a_process_whose_first_thread_has_ended_is_still_there() -> None:
    process = subprocess.Popen([sys.executable, "-c", _LEADERLESS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline_s = time.monotonic() + 30
        while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert EngineProcess(process.pid, None).is_gone(0.2) is False
    finally:
        process.kill()
        process.communicate()


def test_facts_without_start_times_count_a_pid_that_is_there_as_theirs() -> None:
    with pytest.raises(PoolError, match="still runs"):
        require_gone({"pid": os.getpid()}, 0)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"pid": "7"},
        {"processes": []},
        {"processes": "all"},
        {"processes": [[1]]},
        {"processes": [[True, 5]]},
        {"processes": [[-1, 5]]},
        {"processes": [[1, 2]] * 2000},
    ],
)
def test_an_engine_that_does_not_say_who_it_is_is_never_taken_for_gone(facts: dict[str, Any]) -> None:
    with pytest.raises(PoolError, match="facts"):
        require_gone(facts, 0)


def test_where_pids_mean_something_else_nobody_is_known_to_be_gone() -> None:
    facts = {**told_processes(), "processes": [[os.getpid(), 1]]}
    require_gone(facts, 0)
    facts["pid_namespace"] += 1
    assert not can_be_seen(facts)
    with pytest.raises(PoolError, match="cannot be seen"):
        require_gone(facts, 0)


def test_without_descriptors_nobody_is_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(alive.os, "pidfd_open", none_left)
    assert EngineProcess(os.getpid(), 1).is_gone() is False


def test_a_front_end_of_nonsense_is_none() -> None:
    assert front_end({}) is None
    assert front_end({"front_end": "x"}) is None
