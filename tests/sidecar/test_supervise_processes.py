"""Process trees for real: deaths are told, strangers are never signalled, nothing is left."""

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.sidecar import process_watch
from midstream.sidecar.process_watch import Death, TreeWatch
from midstream.sidecar.processes import (
    Process,
    can_die_with_parent,
    dies_with_parent,
    open_pidfd,
    read_process,
    say_status,
    send,
)

# A root with a child and a grandchild; the pids are printed as the processes come up.
TREE = """
import subprocess, sys, time
print("root", flush=True)
child = "import subprocess, sys, time; g = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
child += "print(g.pid, flush=True); time.sleep(60)"
c = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
print(c.pid, c.stdout.readline().strip(), flush=True)
time.sleep(60)
"""


class Tree:
    """A running TREE: root, child and grandchild."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.popen.stdout is not None
        self.popen.stdout.readline()
        self.child, self.grandchild = (known(int(word)) for word in self.popen.stdout.readline().split())
        self.root = known(self.popen.pid)

    def close(self) -> None:
        for process in (self.root, self.child, self.grandchild):
            send(process, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def spawn(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)


def known(pid: int) -> Process:
    process = read_process(pid)
    assert process is not None
    return process


@pytest.fixture
def tree() -> Iterator[Tree]:
    running = Tree()
    yield running
    running.close()


async def until(condition: Callable[[], bool], within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


async def test_the_tree_of_a_process_holds_children_and_grandchildren(tree: Tree) -> None:
    watch = TreeWatch(tree.root, lambda death: None)
    watch.start()
    assert {p.pid for p in watch.living()} == {tree.root.pid, tree.child.pid, tree.grandchild.pid}
    assert watch.living()[0] == tree.root
    watch.close()


async def test_a_child_in_a_session_of_its_own_is_of_the_tree_and_a_stranger_is_not() -> None:
    inner = "import time; time.sleep(60)"
    code = "import subprocess, sys, time;"
    code += f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); print(1, flush=True);"
    popen, stranger = spawn(code + inner), spawn(inner)
    assert popen.stdout is not None
    popen.stdout.readline()
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    assert len(watch.living()) == 2
    assert await watch.kill(0) == []
    assert read_process(stranger.pid) is not None
    stranger.kill()
    for process in (popen, stranger):
        process.communicate()
    watch.close()


async def test_looking_for_new_processes_is_cheap_however_many_threads_they_have() -> None:
    code = "import threading, time\n"
    code += "for _ in range(300): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    popen = spawn(code + "print(1, flush=True); time.sleep(60)")
    assert popen.stdout is not None
    popen.stdout.readline()
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    fastest_s = 1.0
    for _ in range(20):
        began = time.perf_counter()
        watch.scan()
        fastest_s = min(fastest_s, time.perf_counter() - began)
    assert fastest_s < 0.003
    assert await watch.kill(0) == []
    popen.communicate()
    watch.close()


async def test_the_death_of_any_process_of_the_tree_is_told_at_once(tree: Tree) -> None:
    deaths: list[Death] = []
    watch = TreeWatch(tree.root, deaths.append)
    watch.start()
    began = time.perf_counter()
    os.kill(tree.grandchild.pid, signal.SIGKILL)
    await until(lambda: bool(deaths))
    assert time.perf_counter() - began < 0.5
    assert deaths[0].process.is_same(tree.grandchild)
    assert not deaths[0].is_root
    watch.close()


async def test_how_the_root_ended_is_told(tree: Tree) -> None:
    deaths: list[Death] = []
    watch = TreeWatch(tree.root, deaths.append)
    watch.start()
    os.kill(tree.root.pid, signal.SIGKILL)
    await until(lambda: bool(deaths))
    assert deaths[0].is_root
    assert say_status(deaths[0].status) == "killed by SIGKILL"
    watch.close()


async def test_a_child_that_comes_later_is_watched_too() -> None:
    inner = "import time; time.sleep(60)"
    popen = spawn(f"import subprocess, time, sys; time.sleep(0.4); subprocess.run([sys.executable, '-c', {inner!r}])")
    deaths: list[Death] = []
    watch = TreeWatch(known(popen.pid), deaths.append)
    watch.start()
    await until(lambda: len(watch.living()) == 2)
    os.kill(watch.living()[1].pid, signal.SIGKILL)
    await until(lambda: bool(deaths))
    assert not deaths[0].is_root
    assert await watch.kill(0) == []
    popen.communicate()
    watch.close()


async def test_a_death_is_told_also_where_descriptors_have_run_out(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(process: Process) -> int | None:
        raise OSError(errno.EMFILE, "Too many open files")

    deaths: list[Death] = []
    watch = TreeWatch(tree.root, deaths.append)
    with monkeypatch.context() as patched:
        patched.setattr(process_watch, "open_pidfd", no_more)
        watch.start()
    assert len(watch.living()) == 3
    os.kill(tree.child.pid, signal.SIGKILL)
    await until(lambda: bool(deaths))
    assert deaths[0].process.is_same(tree.child)
    assert await watch.kill(0) == []
    assert watch.living() == []
    watch.close()


async def test_a_root_that_is_dead_already_is_told(tree: Tree) -> None:
    tree.popen.kill()
    tree.popen.wait()
    deaths: list[Death] = []
    watch = TreeWatch(tree.root, deaths.append)
    watch.start()
    await until(lambda: bool(deaths))
    assert deaths[0].is_root
    assert say_status(deaths[0].status) == "how it ended is not known"
    watch.close()


@pytest.fixture
def adopts_orphans() -> Iterator[None]:
    """This process gets the orphans of its children, as PID 1 of a container does."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, 0, 0, 0, 0)


@pytest.mark.usefixtures("adopts_orphans")
async def test_killing_takes_the_orphans_along_and_leaves_no_zombie(tree: Tree) -> None:
    watch = TreeWatch(tree.root, lambda death: None)
    watch.start()
    os.kill(tree.root.pid, signal.SIGKILL)
    tree.popen.wait()
    assert read_process(tree.grandchild.pid) is not None
    assert await watch.kill(0) == []
    assert read_process(tree.child.pid) is None
    assert read_process(tree.grandchild.pid) is None
    for process in (tree.child, tree.grandchild):
        await until(lambda pid=process.pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    watch.close()


async def test_an_orphan_that_was_never_seen_is_found_by_its_session(tree: Tree) -> None:
    os.kill(tree.child.pid, signal.SIGKILL)  # the grandchild hangs on nobody we know
    watch = TreeWatch(tree.root, lambda death: None)
    watch.start()
    assert await watch.kill(0) == []
    assert read_process(tree.grandchild.pid) is None
    watch.close()


async def test_how_children_ended_is_known_for_their_parent_is_ended_after_them(tree: Tree) -> None:
    deaths: list[Death] = []
    watch = TreeWatch(tree.root, deaths.append)
    watch.start()
    assert await watch.kill(0) == []
    told = {death.process.pid: say_status(death.status) for death in deaths}
    assert told[tree.child.pid] == told[tree.root.pid] == "killed by SIGKILL"
    watch.close()


async def test_what_a_killed_tree_had_in_shared_memory_is_removed_by_who_is_there_for_that() -> None:
    code = "import time\nfrom multiprocessing.shared_memory import SharedMemory\n"
    code += "print(SharedMemory(create=True, size=1 << 20).name, flush=True)\ntime.sleep(60)\n"
    popen = spawn(code)
    assert popen.stdout is not None
    segment = Path("/dev/shm") / popen.stdout.readline().decode().strip()
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    await until(lambda: len(watch.living()) == 2)
    [tracker] = [process for process in watch.living() if process.pid != popen.pid]
    assert segment.exists()
    assert await watch.kill(0) == []
    assert not segment.exists()
    assert read_process(tracker.pid) is None
    assert popen.wait() == -signal.SIGKILL
    popen.communicate()
    watch.close()


async def test_one_that_tidies_up_and_does_not_end_is_ended() -> None:
    word = "multiprocessing.resource_tracker"
    popen = spawn(f"import time\n{word!r}\nprint(1, flush=True)\ntime.sleep(60)")
    assert popen.stdout is not None
    popen.stdout.readline()
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    began_s = time.monotonic()
    assert await watch.kill(0) == []
    assert time.monotonic() - began_s < 5
    assert popen.wait() == -signal.SIGKILL
    popen.communicate()
    watch.close()


async def test_a_root_that_starts_its_child_again_is_ended_all_the_same() -> None:
    inner = "import time; time.sleep(60)"
    popen = spawn(f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', {inner!r}])")
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    await until(lambda: len(watch.living()) == 2)
    assert await watch.kill(0) == []
    assert popen.wait() == -signal.SIGKILL
    assert watch.living() == []
    popen.communicate()
    watch.close()


async def test_a_process_whose_first_thread_is_dead_is_there_until_its_last_one_is(tree: Tree) -> None:
    code = "import ctypes, os, threading, time\n"
    code += "threading.Thread(target=time.sleep, args=(60,)).start()\nprint(1, flush=True)\n"
    code += "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\n"
    popen = spawn(code)
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    await until(lambda: read_process(popen.pid) is None)
    assert popen.poll() is None
    assert len(watch.living()) == 1
    assert await watch.kill(0) == []
    assert popen.poll() == -signal.SIGKILL
    popen.communicate()
    watch.close()


@pytest.mark.parametrize("obeys", [True, False])
async def test_a_tree_gets_its_grace_and_then_no_more(obeys: bool) -> None:
    handler = "" if obeys else "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    popen = spawn(f"import signal, time; {handler} print(1, flush=True); time.sleep(60)")
    assert popen.stdout is not None
    popen.stdout.readline()
    watch = TreeWatch(known(popen.pid), lambda death: None)
    watch.start()
    began = time.perf_counter()
    assert await watch.kill(0.4) == []
    assert popen.wait() == (-signal.SIGTERM if obeys else -signal.SIGKILL)
    assert (time.perf_counter() - began < 0.35) is obeys
    watch.close()
    popen.stdout.close()


def test_a_pid_that_now_is_another_process_is_not_touched(tree: Tree) -> None:
    stranger = Process(tree.root.pid, tree.root.started - 1, tree.root.name, 1, 1)
    assert open_pidfd(stranger) is None
    assert send(stranger, signal.SIGKILL) is False
    assert read_process(tree.root.pid) == tree.root


def test_a_name_with_spaces_and_parentheses_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    popen = subprocess.Popen([str(odd), "30"])
    process = known(popen.pid)
    assert process.name == "a) R (b"
    assert process.parent == os.getpid()
    popen.kill()
    popen.wait()
    assert read_process(popen.pid) is None


def test_an_engine_gets_a_signal_when_its_starter_is_killed(tmp_path: Path) -> None:
    assert can_die_with_parent()
    code = """
import subprocess, sys, signal, time
from midstream.sidecar.processes import dies_with_parent
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
p = subprocess.Popen(sleep, preexec_fn=dies_with_parent(signal.SIGTERM))
print(p.pid, flush=True)
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    engine = known(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 3
    while engine.is_same(read_process(engine.pid)):
        assert time.monotonic() < deadline, "the engine outlived its starter"
        time.sleep(0.01)


def test_a_child_of_a_starter_that_is_gone_already_does_not_start() -> None:
    prepare = dies_with_parent(signal.SIGTERM)
    pid = os.fork()
    if pid == 0:  # its parent is not the one that prepare() remembers once it has forked again
        inner = os.fork()
        if inner == 0:
            prepare()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_statuses_are_said_in_words() -> None:
    assert say_status(9) == "killed by SIGKILL"
    assert say_status(3 << 8) == "exit code 3"
    assert say_status(None) == "how it ended is not known"
