"""The mover's socket: what is understood, what is refused, and who may speak."""

import asyncio
import contextlib
import json
import pickle
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import LINE_BYTES_MAX, MoverError, Reason
from support.mover_rig import Processes

SESSION = SessionId("1" * 32)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    started.start_mover()
    yield started
    started.stop()
    assert "Traceback" not in started.log()


@pytest.fixture
async def mover(processes: Processes) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.mover_path)
    yield client
    await client.close()


def exchange(path: Path, data: bytes, answers: int = 1) -> list[dict[str, Any]]:
    """Send bytes, read answers; fewer when the mover closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        received, resets = b"", 0
        while received.count(b"\n") < answers and resets < 2:
            try:
                part = connection.recv(65536)
            except ConnectionResetError:
                # The mover closed before it had read everything: the kernel says that first, the answer comes after.
                resets += 1
                continue
            if not part:
                break
            received += part
    return [json.loads(line) for line in received.splitlines()]


def request(**fields: Any) -> bytes:
    return json.dumps({"id": 1, **fields}).encode() + b"\n"


RESTORE = {
    "op": "restore",
    "session": SESSION,
    "from": {"store": True},
    "to": {"arena": "/nowhere", "generation": 2},
    "deadline_s": 1,
}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n", "not JSON"),
        (b"\x80\x04\x95\n", "not JSON"),
        (pickle.dumps({"op": "status"}).replace(b"\n", b"") + b"\n", "not JSON"),
        (b"[" * 50_000 + b"\n", "not JSON"),
        (b"[]\n", "not a JSON object"),
        (request(), "unknown op None"),
        (request(op="explode"), "unknown op 'explode'; use one of finish, kept, release, replicated, restore"),
        (request(op=["status"]), "unknown op"),
        (request(op={"a": 1}), "unknown op"),
        (request(op="watch"), "arena is None; give an absolute path"),
        (request(op="watch", arena="relative"), "absolute path"),
        (request(op="watch", arena="/a\0b"), "absolute path"),
        (request(op="watch", arena="/" + "a" * 5000), "absolute path"),
        (request(op="watch", arena="/nowhere/arena", worker="w"), "is not there"),
        (request(op="watch", arena="/etc/passwd", worker="w"), "arena /etc/passwd"),
        (request(op="watch", arena="/proc", worker="w"), "cannot be mapped"),
        (request(op="watch", arena="/x", worker=7), "give its name"),
        (request(**RESTORE | {"session": "x"}), "32 lower-case hex digits"),
        (request(**RESTORE | {"session": 7}), "session"),
        (request(**RESTORE | {"from": None}), "from is None; give an object"),
        (request(**RESTORE | {"from": {}}), "absolute path"),
        (request(**RESTORE | {"from": {"arena": "/x", "generation": -1}}), "not negative"),
        (request(**RESTORE | {"from": {"arena": "/x", "generation": True}}), "not negative"),
        (request(**RESTORE | {"deadline_s": 0}), "give seconds"),
        (request(**RESTORE | {"deadline_s": 1e9}), "give seconds"),
        (request(**RESTORE | {"deadline_s": float("nan")}), "give seconds"),
        (request(**RESTORE | {"deadline_s": "1"}), "give seconds"),
        (request(**RESTORE), "arena /nowhere is not there"),
        (request(op="snapshot", arena="/x"), "start it with --store"),
        (request(op="verify", arena="/x", session=SESSION, generation=1), "is not there"),
        (b'{"id":{"a":1},"op":"status"}\n', "id must be"),
        (b"x" * (LINE_BYTES_MAX + 10) + b"\n", "longer than"),
        (b"x" * (LINE_BYTES_MAX * 4), "longer than"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(
    processes: Processes, mover: MoverClient, data: bytes, message: str
) -> None:
    (answer,) = await asyncio.to_thread(exchange, processes.mover_path, data)
    assert answer["ok"] is False
    assert message in answer["error"]
    assert answer["reason"] in set(Reason)
    assert (await mover.status())["requests_refused"] == 1


async def test_random_bytes_never_end_the_mover(processes: Processes, mover: MoverClient) -> None:
    chance = random.Random(11)
    for _ in range(50):
        data = chance.randbytes(chance.randrange(1, 2000)) + b"\n"
        for answer in await asyncio.to_thread(exchange, processes.mover_path, data, data.count(b"\n")):
            assert answer["ok"] is False
    await mover.status()


async def test_answers_carry_the_id_of_their_request(processes: Processes) -> None:
    lines = b"".join(json.dumps({"id": n, "op": "status"}).encode() + b"\n" for n in range(20))
    answers = await asyncio.to_thread(exchange, processes.mover_path, lines, 20)
    assert sorted(answer["id"] for answer in answers) == list(range(20))
    assert all(answer["ok"] for answer in answers)


async def test_a_request_in_pieces_is_one_request(processes: Processes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(processes.mover_path))
    for byte in request(op="status"):
        writer.write(bytes([byte]))
        await writer.drain()
    assert json.loads(await reader.readline())["ok"] is True
    writer.close()
    await writer.wait_closed()


async def test_more_connections_than_the_limit_are_closed_and_the_others_served(
    processes: Processes, mover: MoverClient
) -> None:
    await mover.status()
    held = [await asyncio.open_unix_connection(str(processes.mover_path)) for _ in range(31)]
    assert await asyncio.to_thread(exchange, processes.mover_path, request(op="status")) == []
    assert (await mover.status())["requests_refused"] == 1
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    for _ in range(100):
        if await asyncio.to_thread(exchange, processes.mover_path, request(op="status")):
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("connections that were closed are still counted")


async def test_a_client_that_leaves_in_the_middle_disturbs_nobody(processes: Processes, mover: MoverClient) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(processes.mover_path))
            connection.sendall(request(op="status") * 50 + b'{"op":')
    await mover.status()


async def test_calls_after_a_restart_of_the_mover_work_again(processes: Processes, mover: MoverClient) -> None:
    await mover.status()
    assert processes.mover is not None
    processes.mover.kill()
    processes.mover.wait()
    with pytest.raises(MoverError, match="recomputed until it is back") as caught:
        await mover.status()
    assert caught.value.reason is Reason.UNREACHABLE
    processes.start_mover()
    assert (await mover.status())["restores"] == 0


async def test_the_socket_is_for_its_user_only_and_for_one_mover(processes: Processes, mover: MoverClient) -> None:
    assert stat.S_IMODE(processes.mover_path.stat().st_mode) == 0o600
    second = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "midstream.sidecar.mover"),
            *("--socket", str(processes.mover_path), "--holder", "/x"),
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 1
    assert "another process serves it" in second.stderr
    await mover.status()


def test_a_mover_ends_with_the_process_that_it_was_started_for(tmp_path: Path) -> None:
    started = Processes(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    started.start_mover("--parent-pid", str(parent.pid))
    parent.kill()
    parent.wait()
    assert started.mover is not None
    assert started.mover.wait(10) == 0
    assert not started.mover_path.exists()


@pytest.mark.parametrize(
    "options",
    [["--snapshot-every-s", "-1"], ["--poll-s", "0"], ["--store-bytes-max", "0"], ["--tail-every-tokens", "0"]],
)
def test_a_wrong_option_is_named(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "midstream.sidecar.mover", "--socket", "/x", "--holder", "/x", *options],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert options[0] in done.stderr


def test_a_store_that_cannot_be_used_is_said_and_the_mover_serves_on(tmp_path: Path) -> None:
    started = Processes(tmp_path)
    started.start_mover("--store", "/proc/store")
    (answer,) = exchange(started.mover_path, request(op="stored", session=SESSION))
    assert answer == {"id": 1, "ok": True} | dict.fromkeys(("generation", "prompt_len", "kv_len", "outputs"), 0) | {
        "found": False,
        "prompt_hash": "",
        "key": None,
        "recomputed": False,
    }
    deadline = time.monotonic() + 5
    while "event=no_store serving=on" not in started.log() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "event=no_store serving=on" in started.log()
    started.stop()
