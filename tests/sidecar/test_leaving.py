"""What is left of a sidecar that has ended: nothing that nobody needs, and all that somebody does."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from midstream.session.held import HolderClient, create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.session.ticket import CLAIMED, TICKET, claim_ticket, worker_dir
from midstream.sidecar.leaving import tidy
from midstream.sidecar.mover.suspects import suspects_beside
from midstream.sidecar.state_dir import owned_state_dir

CLI = [sys.executable, "-m", "midstream.sidecar.cli"]
LAYOUT = PoolLayout(4, 4, (Plane(0, 1024, 1024),))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    yield folder
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def serve(state: Path, *words: str) -> "subprocess.Popen[str]":
    argv = [*CLI, "serve", "--worker", "a=http://127.0.0.1:9", "--state-dir", str(state), *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def end(sidecar: "subprocess.Popen[str]") -> None:
    sidecar.terminate()
    _, said = sidecar.communicate(timeout=60)
    assert sidecar.returncode == 0, said


def test_a_sidecar_whose_port_is_in_use_leaves_no_folder(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sidecar = serve(state, "--port", str(taken.getsockname()[1]))
        _, said = sidecar.communicate(timeout=60)
    assert sidecar.returncode == 2
    assert "Address already in use" in said
    assert not state.exists()


def test_a_sidecar_that_served_nobody_leaves_neither_folder_nor_holder(state: Path) -> None:
    sidecar = serve(state, "--port", "0")
    until((worker_dir(state, "a") / TICKET).exists)
    end(sidecar)
    assert not state.exists()
    assert [
        p for p in psutil.process_iter(["cmdline"]) if str(state / "holder.sock") in (p.info["cmdline"] or ())
    ] == []


def test_files_of_others_are_left_in_a_folder_of_theirs(state: Path) -> None:
    state.mkdir(mode=0o700)
    (state / "notes").write_text("mine")
    sidecar = serve(state, "--port", "0")
    until((worker_dir(state, "a") / TICKET).exists)
    end(sidecar)
    assert {entry.name for entry in state.iterdir()} == {"notes", "sidecar.lock"}


def test_an_engine_that_has_taken_its_place_keeps_folder_and_holder(state: Path) -> None:
    sidecar = serve(state, "--port", "0")
    until((worker_dir(state, "a") / TICKET).exists)
    claim_ticket(worker_dir(state, "a"))
    end(sidecar)
    # Its pool comes only now.
    fd = create_host_pool(LAYOUT.end)
    meta = PoolMeta(LAYOUT.end, LAYOUT, LAYOUT.fingerprint(), {"pid": os.getpid(), "fd": fd})
    HolderClient(state / "holder.sock").put("a/1/0", fd, meta.to_json())
    os.close(fd)
    assert (worker_dir(state, "a") / "1.arena").exists()


def test_a_pool_keeps_the_holder_and_the_folder(state: Path) -> None:
    sidecar = serve(state, "--port", "0")
    until((worker_dir(state, "a") / TICKET).exists)
    fd = create_host_pool(LAYOUT.end)
    meta = PoolMeta(LAYOUT.end, LAYOUT, LAYOUT.fingerprint(), {"pid": os.getpid(), "fd": fd})
    HolderClient(state / "holder.sock").put("b/1/0", fd, meta.to_json())
    os.close(fd)
    end(sidecar)
    assert [pool.name for pool in HolderClient(state / "holder.sock").list()] == ["b/1/0"]


def test_what_a_mover_noted_of_a_fault_goes_with_the_mover(state: Path) -> None:
    state.mkdir()
    suspects_beside(str(state / "mover.sock")).write_text("[]")
    tidy(state)
    assert list(state.iterdir()) == []


def test_a_claim_whose_arena_is_gone_is_nobody_s_place(state: Path) -> None:
    folder = worker_dir(state, "a")
    folder.mkdir(parents=True)
    (folder / CLAIMED).write_text(json.dumps({"MIDSTREAM_EPOCH": "3"}))
    (folder / "2.arena").touch()
    tidy(state)
    assert list(state.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / CLAIMED).write_text(json.dumps({"MIDSTREAM_EPOCH": "3"}))
    (folder / "3.arena").touch()
    tidy(state)
    assert (folder / "3.arena").exists()


def test_of_many_that_come_and_go_never_two_are_in_the_folder(state: Path) -> None:
    inside: list[int] = []
    crowded: list[int] = []
    entered = threading.Semaphore(0)

    def come_and_go() -> None:
        from midstream.session.errors import ConfigError

        for _ in range(200):
            with suppress(ConfigError), owned_state_dir(state):
                inside.append(1)
                crowded.extend(inside[1:])
                entered.release()
                inside.pop()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowded == []
    assert entered.acquire(blocking=False)
    assert not state.exists()


def test_a_holder_that_nobody_needs_ends_itself(tmp_path: Path) -> None:
    path = tmp_path / "holder.sock"
    argv = [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(path), "--idle-s", "1.5"]
    holder = subprocess.Popen(argv)
    try:
        until(path.exists)
        client = HolderClient(path)
        # As long as somebody asks, it stays.
        asked_until_s = time.monotonic() + 4
        while time.monotonic() < asked_until_s:
            client.list()
            time.sleep(0.1)
        fd = create_host_pool(LAYOUT.end)
        client.put("w/1/0", fd, PoolMeta(LAYOUT.end, LAYOUT, LAYOUT.fingerprint(), {}).to_json())
        os.close(fd)
        # So it does while it holds something.
        with pytest.raises(subprocess.TimeoutExpired):
            holder.wait(3)
        assert client.drop("w/1/0")
        assert holder.wait(30) == 0
        assert not path.exists()
    finally:
        if holder.poll() is None:
            holder.send_signal(signal.SIGKILL)
            holder.wait(10)
