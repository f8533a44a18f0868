"""The holder as a process of its own, over its real socket."""

import contextlib
import json
import mmap
import os
import pickle
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.session.errors import PoolError
from midstream.session.held import HolderClient, create_host_pool, map_pool, rescue
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory

SIZE = 1 << 16
LAYOUT = PoolLayout(16, 4, (Plane(0, 2048, 2048), Plane(32768, 2048, 2048)))

WRITER = """
import sys, time
from midstream.session.held import HolderClient, create_host_pool, map_pool
from midstream.session.layout import PoolLayout, PoolMeta
size = 1 << 16
fd = create_host_pool(size)
layout = PoolLayout.from_json({"block_count": 16, "block_tokens": 4, "planes": [[0, 4096, 4096]]}, size)
view = map_pool(fd, size)
HolderClient(sys.argv[1]).put("w/1/0", fd, PoolMeta(size, layout, layout.fingerprint(), {}).to_json())
n = 0
print(fd, flush=True)
while True:
    n += 1
    view[100:108] = n.to_bytes(8, "little")
    if n == 1000:
        print("written", flush=True)
"""


def meta(size_bytes: int = SIZE) -> dict[str, object]:
    return PoolMeta(size_bytes, LAYOUT, LAYOUT.fingerprint(), {"pid": os.getpid(), "fd": 3}).to_json()


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(path), *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(PoolError):
            HolderClient(path).list()
            return process
        time.sleep(0.02)
    stop(process)
    raise AssertionError("the holder did not come up")


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holder.sock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(path, "--pools-max", "3")
    yield process
    stop(process)


@pytest.fixture
def client(path: Path, holder: subprocess.Popen[str]) -> HolderClient:
    return HolderClient(path)


@pytest.fixture
def pool() -> Iterator[int]:
    fd = create_host_pool(SIZE)
    yield fd
    os.close(fd)


def raw(path: Path, message: bytes, fds: tuple[int, ...] = ()) -> dict[str, object] | None:
    """What the holder answers to any bytes; None when it closed the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        try:
            socket.send_fds(connection, [message], list(fds))
            reply = connection.recv(1 << 16)
        except ConnectionError:
            return None
    return json.loads(reply) if reply else None


def open_descriptors(process: subprocess.Popen[str]) -> int:
    """How many descriptors the process has once it has noticed that its clients are gone."""
    counts = [-1]
    while len(counts) < 5 or len(set(counts[-5:])) > 1:
        time.sleep(0.02)
        counts.append(len(os.listdir(f"/proc/{process.pid}/fd")))
        assert len(counts) < 500
    return counts[-1]


def flood(connection: socket.socket) -> None:
    for _ in range(100_000):
        connection.send(b'{"op":"list"}')


def test_a_pool_comes_back_with_its_meta_and_its_bytes(client: HolderClient, pool: int) -> None:
    with map_pool(pool, SIZE) as view:
        view[:5] = b"bytes"
    client.put("worker/1/0", pool, meta())
    fd, body = client.get("worker/1/0")
    with map_pool(fd, SIZE) as view:
        assert view[:5] == b"bytes"
    os.close(fd)
    assert PoolMeta.from_json(body).layout == LAYOUT
    assert [(p.name, p.size_bytes) for p in client.list()] == [("worker/1/0", SIZE)]
    assert client.drop("worker/1/0")
    assert not client.drop("worker/1/0")
    assert client.list() == []


def test_a_pool_outlives_the_process_that_wrote_it(path: Path, client: HolderClient) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    assert writer.stdout.readline() == "written\n"
    writer.kill()
    writer.communicate()
    fd, _ = client.get("w/1/0")
    with map_pool(fd, SIZE) as view:
        assert int.from_bytes(view[100:108], "little") >= 1000
    os.close(fd)


def test_after_the_holder_was_killed_a_live_pool_is_rescued(path: Path, client: HolderClient) -> None:
    holder = start(path.with_name("second.sock"))
    client = HolderClient(path.with_name("second.sock"))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path.with_name("second.sock"))], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    fd_number = int(writer.stdout.readline())
    body = client.get("w/1/0")
    os.close(body[0])
    stop(holder)
    with pytest.raises(PoolError, match="start it"):
        client.get("w/1/0")

    holder = start(path.with_name("second.sock"))
    assert client.list() == []
    rescued = rescue(writer.pid, fd_number)
    client.put("w/1/0", rescued, body[1])
    os.close(rescued)
    writer.kill()
    writer.communicate()
    fd, _ = client.get("w/1/0")
    with map_pool(fd, SIZE) as view:
        assert int.from_bytes(view[100:108], "little") > 0
    os.close(fd)
    stop(holder)


def test_what_is_rescued_must_be_a_pool_of_a_living_process() -> None:
    with pytest.raises(PoolError, match="its owner is gone"):
        rescue(2**22 + 1, 5)
    reader, writer = os.pipe()
    try:
        with pytest.raises(PoolError, match="sealed memfd"):
            rescue(os.getpid(), reader)
    finally:
        os.close(reader)
        os.close(writer)


# Descriptors of device memory need a GPU. An eventfd is like one in what counts here: nameless, bound to its open file,
# and not to be opened again; its count tells whether it is the same one.
GPU = cuda_memory("GPU-7a0c8b8f-1d3e-4f6a-9b2c-0123456789ab")


def device_meta(identity: str = "0" * 32) -> dict[str, object]:
    return PoolMeta(SIZE, LAYOUT, LAYOUT.fingerprint(), {"pid": os.getpid()}, GPU, identity).to_json()


def test_what_cannot_be_opened_again_is_rescued_as_the_open_file_it_is(client: HolderClient) -> None:
    code = "import os, sys; print(os.eventfd(41), flush=True); sys.stdin.read()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    fd_number = int(owner.stdout.readline())
    with pytest.raises(PoolError):
        rescue(owner.pid, fd_number)
    rescued = rescue(owner.pid, fd_number, GPU)
    assert not os.get_inheritable(rescued)
    client.put("w/1/0", rescued, device_meta())
    os.close(rescued)
    owner.communicate("")
    fd, body = client.get("w/1/0")
    assert os.eventfd_read(fd) == 41
    assert body == device_meta()
    os.close(fd)


def test_files_pipes_and_memfds_are_no_device_memory(client: HolderClient, pool: int, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    files = [os.open(tmp_path, os.O_RDONLY), os.open(os.devnull, os.O_RDWR), reader, writer]
    try:
        for fd in (pool, *files):
            with pytest.raises(PoolError, match="no device memory"):
                client.put("w/1/0", fd, device_meta())
    finally:
        for fd in files:
            os.close(fd)
    assert client.list() == []


def test_no_process_gives_up_a_descriptor_that_it_does_not_have() -> None:
    with pytest.raises(PoolError, match="its owner is gone"):
        rescue(2**22 + 1, 5, GPU)
    with pytest.raises(PoolError, match="Bad file descriptor"):
        rescue(os.getpid(), 1 << 20, GPU)


def test_device_memory_is_the_same_where_its_maker_says_so(client: HolderClient) -> None:
    first, second = os.eventfd(1), os.eventfd(2)
    try:
        client.put("w/1/0", first, device_meta())
        client.put("w/1/0", first, device_meta() | {"owner": {"pid": 7}})
        with pytest.raises(PoolError, match="other memory"):
            client.put("w/1/0", second, device_meta("1" * 32))
        # Nor does it pass for host memory, or the other way round.
        with pytest.raises(PoolError):
            client.put("w/1/0", second, meta())
    finally:
        os.close(first)
        os.close(second)
    fd, body = client.get("w/1/0")
    assert (os.eventfd_read(fd), body["owner"]) == (1, {"pid": 7})
    os.close(fd)


def test_putting_the_same_memory_again_renews_the_meta_and_other_memory_is_refused(
    client: HolderClient, pool: int
) -> None:
    client.put("w/1/0", pool, meta())
    client.put("w/1/0", pool, meta() | {"owner": {"pid": 7}})
    fd, body = client.get("w/1/0")
    os.close(fd)
    assert body["owner"] == {"pid": 7}
    other = create_host_pool(SIZE)
    try:
        with pytest.raises(PoolError, match="held already"):
            client.put("w/1/0", other, meta())
    finally:
        os.close(other)


def test_an_unknown_pool_is_named_with_the_remedy(client: HolderClient) -> None:
    with pytest.raises(PoolError, match="no pool w/9/0 is held; its engine has to put it"):
        client.get("w/9/0")


def test_a_full_holder_says_so_and_keeps_what_it_has(client: HolderClient, pool: int) -> None:
    for number in range(3):
        client.put(f"w/{number}/0", pool, meta())
    with pytest.raises(PoolError, match="raise --pools-max"):
        client.put("w/3/0", pool, meta())
    assert len(client.list()) == 3


def test_memory_that_could_shrink_or_is_too_small_is_refused(client: HolderClient, pool: int, tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(PoolError, match="not sealed"):
            client.put("w/1/0", unsealed, meta())
        with pytest.raises(PoolError):
            client.put("w/1/0", file, meta())
    finally:
        os.close(unsealed)
        os.close(file)
    with pytest.raises(PoolError, match="announce its real size"):
        client.put("w/1/0", pool, meta(SIZE * 2))
    assert client.list() == []


def test_a_pool_can_never_change_its_size(pool: int) -> None:
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(pool, size)


def test_a_layout_outside_the_pool_is_refused(client: HolderClient, pool: int) -> None:
    body = meta()
    body["layout"] = {"block_count": 17, "block_tokens": 4, "planes": [[0, 4096, 4096]]}
    with pytest.raises(PoolError, match="layout needs 69632 bytes"):
        client.put("w/1/0", pool, body)


@pytest.mark.parametrize(
    "message",
    [
        b"\x80\x04\x95",
        pickle.dumps({"op": "list"}),
        b"{" * 5000,
        b"[" * 60000,
        b'"list"',
        b"null",
        b"{}",
        b'{"op":"put"}',
        b'{"op":["list"]}',
        b'{"op":"get","name":7}',
        b'{"op":"get","name":"' + b"x" * 161 + b'"}',
        b'{"op":"get","name":"a\\u0000b"}',
        b'{"op":"put","name":"w/1/0","meta":[]}',
        b'{"op":"list"}' + b" " * 100_000,
        b"\xff" * 65536,
    ],
)
def test_hostile_messages_get_an_error_and_the_holder_serves_on(
    path: Path, client: HolderClient, holder: subprocess.Popen[str], message: bytes
) -> None:
    answer = raw(path, message)
    assert answer is None or answer["ok"] is False
    assert client.list() == []
    assert holder.poll() is None


def test_hostile_metas_are_refused_and_keep_no_descriptor(
    path: Path, client: HolderClient, holder: subprocess.Popen[str], pool: int
) -> None:
    before = open_descriptors(holder)
    for body in (None, [], {"size_bytes": -1}, {"size_bytes": 1e400}, {"size_bytes": True}, {"size_bytes": 2**70}):
        answer = raw(path, json.dumps({"op": "put", "name": "w/1/0", "meta": body}).encode(), (pool,))
        assert answer is not None
        assert answer["ok"] is False
    for fds in ((), (pool, pool), (pool,) * 20):
        answer = raw(path, json.dumps({"op": "put", "name": "w/1/0", "meta": meta()}).encode(), fds)
        assert answer is not None
        assert answer["ok"] is False
    assert client.list() == []
    assert open_descriptors(holder) == before


def test_random_bytes_with_descriptors_never_end_the_holder(
    path: Path, client: HolderClient, holder: subprocess.Popen[str], pool: int
) -> None:
    chance = random.Random(7)
    for _ in range(200):
        answer = raw(path, chance.randbytes(chance.randrange(1, 400)), (pool,) * chance.randrange(3))
        assert answer is None or answer["ok"] is False
    assert client.list() == []


def test_more_connections_than_the_limit_close_the_idle_ones_and_not_the_service(
    path: Path, client: HolderClient, holder: subprocess.Popen[str]
) -> None:
    idle = []
    for _ in range(200):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(path))
        idle.append(connection)
    assert client.list() == []
    for connection in idle:
        connection.close()
    assert client.list() == []
    assert open_descriptors(holder) < 30


def test_a_client_that_never_reads_its_answers_is_closed(path: Path, client: HolderClient) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))
        silent.settimeout(2)
        with pytest.raises(ConnectionError):
            flood(silent)
    assert client.list() == []


def test_the_socket_is_for_its_user_only(path: Path, holder: subprocess.Popen[str]) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_holder_leaves_the_first_alone(path: Path, client: HolderClient, pool: int) -> None:
    client.put("w/1/0", pool, meta())
    second = subprocess.run(
        [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 1
    assert "another process serves it" in second.stderr
    assert len(client.list()) == 1


@pytest.mark.parametrize("idle_s", ["nan", "-1", "0", "inf", "1e9", "soon"])
def test_an_idle_time_that_cannot_be_waited_for_is_refused(path: Path, idle_s: str) -> None:
    argv = [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(path), f"--idle-s={idle_s}"]
    refused = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--idle-s" in refused.stderr


def test_a_stale_socket_is_replaced_and_a_file_that_is_none_is_not(path: Path, tmp_path: Path) -> None:
    process = start(path)
    stop(process)
    assert path.exists()
    process = start(path)
    stop(process)
    file = tmp_path / "file"
    file.write_text("precious")
    refused = subprocess.run(
        [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(file)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert refused.returncode == 1
    assert "not a socket" in refused.stderr
    assert file.read_text() == "precious"


def test_sigterm_ends_it_in_good_order(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(10) == 0
    assert not path.exists()


def test_a_pool_that_was_mapped_stays_usable_after_its_drop(client: HolderClient, pool: int) -> None:
    client.put("w/1/0", pool, meta())
    fd, _ = client.get("w/1/0")
    view: mmap.mmap = map_pool(fd, SIZE)
    os.close(fd)
    client.drop("w/1/0")
    view[:3] = b"abc"
    with map_pool(pool, SIZE) as own:
        assert own[:3] == b"abc"
    view.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize(("module", "kind"), [("holder", socket.SOCK_SEQPACKET), ("mover", socket.SOCK_STREAM)])
def test_another_user_is_turned_away_even_where_the_file_would_let_it_in(module: str, kind: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "open.sock"
        command = [sys.executable, "-m", f"midstream.sidecar.{module}", "--socket", str(path)]
        process = subprocess.Popen(command + (["--holder", "/x"] if module == "mover" else []))
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.02)
        Path(folder).chmod(0o755)
        path.chmod(0o666)
        message = b'{"op":"list"}' if module == "holder" else b'{"op":"status"}\n'
        assert heard_as(0, path, kind, message).startswith(b"{")
        assert heard_as(65534, path, kind, message) == b""
        process.kill()
        process.wait()


def heard_as(user: int, path: Path, kind: int, message: bytes) -> bytes:
    """What a process of that user hears when it says `message`."""
    program = f"""
import os, socket
os.setuid({user})
s = socket.socket(socket.AF_UNIX, {int(kind)})
s.settimeout(10)
s.connect({str(path)!r})
try:
    s.send({message!r})
    os.write(1, s.recv(65536))
except ConnectionError:
    pass
"""
    return subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, timeout=30, check=True).stdout
