"""A peer's memory: a real process, over TLS, on a wire that may do anything."""

import concurrent.futures
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from contracts.store_suite import OTHER, SESSION, StoreContract, block, snapshot_of, write

from midstream.session import chunk
from midstream.session.errors import CorruptError, StoreError
from midstream.session.ids import SessionId
from midstream.session.store import Swept
from midstream.sidecar.replicas import peer_server
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.memory_objects import MemoryObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.peer_server import PeerServer
from midstream.sidecar.replicas.peer_site import serving
from midstream.sidecar.replicas.peer_store import Peer, PeerStore
from midstream.sidecar.replicas.peer_wire import BASE, CHUNK_BODY_BYTES_MAX
from midstream.sidecar.replicas.signatures import Verifier, authorization
from support.peers import SECRET, Fleet, ReplicaProcess, make_fleet, start_replicas, wire_to

MEMORY = 64 << 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet") / "files")


@pytest.fixture(scope="module")
def secret_fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("secret") / "files", tls=False)


@pytest.fixture
def node(fleet: Fleet) -> Iterator[ReplicaProcess]:
    process = start_replicas("--memory-bytes", str(MEMORY), *fleet.flags, peer=True)
    yield process
    process.close()


@pytest.fixture
def plain_node(secret_fleet: Fleet) -> Iterator[ReplicaProcess]:
    process = start_replicas("--memory-bytes", str(MEMORY), *secret_fleet.flags, peer=True)
    yield process
    process.close()


def random_chunk(size_bytes: int) -> tuple[str, bytes]:
    return chunk.encode(os.urandom(size_bytes))


class TestContract(StoreContract):
    """What every store must do; the server's objects lie in this process, so that they can be damaged."""

    @pytest.fixture
    def rig(self, fleet: Fleet) -> Iterator["ServedHere"]:
        served = ServedHere(fleet)
        yield served
        served.close()

    @pytest.fixture
    def store(self, rig: "ServedHere") -> "Whole":
        return rig.client()

    @pytest.fixture
    def reopen(self, rig: "ServedHere") -> "Callable[[], Whole]":
        return rig.client

    @pytest.fixture
    def damage(self, rig: "ServedHere") -> Callable[..., None]:
        return rig.damage


class Whole(PeerStore):
    """A peer with what it does for nobody else: removing snapshots is its own process's."""

    def __init__(self, peer: Peer, own: ObjectStore) -> None:
        super().__init__(peer)
        self._own = own

    def delete(self, session: SessionId) -> int:
        return self._own.delete(session)

    def sweep(self) -> Swept:
        return self._own.sweep()


class ServedHere:
    """A peer's server in a thread of this process, over TLS."""

    def __init__(self, fleet: Fleet) -> None:
        import asyncio

        self.fleet = fleet
        self.objects = MemoryObjects()
        self.store = ObjectStore(self.objects, Names("", "peer"), bytes_max=1 << 30)
        assert fleet.credentials.secret is not None
        self.server = PeerServer(self.store, Verifier(fleet.credentials.secret))
        self._clients: list[Whole] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        ready = threading.Event()

        async def serve() -> None:
            async with serving(self.server.app(), self._listener, context=fleet.credentials.server):
                ready.set()
                await self._over.wait()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve()))
        self._thread.start()
        assert ready.wait(10)

    def client(self) -> Whole:
        client = Whole(Peer(f"https://127.0.0.1:{self.port}", credentials=self.fleet.credentials), self.store)
        self._clients.append(client)
        return client

    def damage(self, name: str, *, gone: bool = False) -> None:
        place = f"chunks/peer/{name}"
        stored = self.objects.get(place, 1 << 30)
        assert stored is not None
        if gone:
            self.objects.remove([place])
        else:
            self.objects.replace(place, stored[:-3] + bytes([stored[-3] ^ 1]) + stored[-2:])

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        self._loop.close()
        self._listener.close()


def test_a_snapshot_comes_back_bit_for_bit_from_another_process(node: ReplicaProcess, fleet: Fleet) -> None:
    manifest = write(node.peer(fleet), range(8))
    other = node.peer(fleet)
    assert other.latest(SESSION) == manifest
    assert [other.get_chunk(name) for name in manifest.chunks] == [block(n) for n in range(8)]
    # And so it does for that node's own mover, at its socket.
    mine = node.local()
    assert mine.latest(SESSION) == manifest
    assert mine.get_chunk(manifest.chunks[3]) == block(3)


def test_the_socket_of_a_node_is_nobody_elses_and_gives_nothing_to_write_with(node: ReplicaProcess) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StoreError):
        node.local().begin()


def test_with_the_secret_alone_it_works_on_this_machine(plain_node: ReplicaProcess, secret_fleet: Fleet) -> None:
    manifest = write(plain_node.peer(secret_fleet), range(3))
    assert plain_node.peer(secret_fleet).latest(SESSION) == manifest


def test_beyond_this_machine_nothing_listens_without_certificates(secret_fleet: Fleet, tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [
        sys.executable, "-m", "midstream.sidecar.replicas", "--socket", str(tmp_path / "s"), "--writer", "n",
        "--memory-bytes", "1000000", "--listen", "0.0.0.0:0",
    ]  # fmt: skip
    done = subprocess.run([*command, *secret_fleet.flags], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "needs TLS" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "give a secret or certificates" in done.stderr


def test_wrong_credentials_get_nothing(
    node: ReplicaProcess, plain_node: ReplicaProcess, fleet: Fleet, secret_fleet: Fleet, tmp_path: Path
) -> None:
    write(node.peer(fleet), range(2))
    write(plain_node.peer(secret_fleet), range(2))
    # A certificate of another CA, a secret of another fleet, and neither.
    stranger = make_fleet(tmp_path / "stranger")
    with pytest.raises(ReplicaError) as refused:
        node.peer(stranger).latest(SESSION)
    assert refused.value.reason is Refusal.UNREACHABLE
    other_secret = make_fleet(tmp_path / "other", secret=b"another secret, just as long", tls=False)
    for call in (
        lambda store: store.latest(SESSION),
        lambda store: store.begin(),
        lambda store: store.get_stored("0" * 32),
        lambda store: store.list(),
        lambda store: store.finish(SESSION),
        lambda store: store.figures(),
    ):
        with pytest.raises(ReplicaError) as refused:
            call(plain_node.peer(other_secret))
        assert refused.value.reason is Refusal.UNAUTHORIZED
    for path in ("", "/latest/" + SESSION, "/list", "/nothing", "/../../etc/passwd"):
        connection = http.client.HTTPConnection("127.0.0.1", plain_node.port, timeout=10)
        connection.request("GET", BASE + path)
        answer = connection.getresponse()
        assert answer.status == 401
        assert b"latest" not in answer.read()
        connection.close()
    assert plain_node.peer(secret_fleet).latest(SESSION) is not None


def test_a_right_secret_without_the_certificate_is_refused_in_the_handshake(node: ReplicaProcess, fleet: Fleet) -> None:
    context = ssl.create_default_context(cafile=fleet.files.ca)
    connection = http.client.HTTPSConnection("127.0.0.1", node.port, timeout=10, context=context)

    def ask() -> None:
        connection.request("GET", f"{BASE}/list", headers={"Authorization": signed("GET", f"{BASE}/list")})
        connection.getresponse()

    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask()
    connection.close()


def signed(method: str, target: str, body: bytes = b"", once: str | None = None, now_s: float | None = None) -> str:
    moment = time.time() if now_s is None else now_s
    return authorization(SECRET, method, target, body, now_s=moment, once=once or os.urandom(16).hex())


def test_who_is_refused_again_and_again_does_not_fill_the_log(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    rig = ServedHere(fleet)
    wrong = replace(fleet.credentials, secret=b"another secret, just as long")
    store = PeerStore(Peer(f"https://127.0.0.1:{rig.port}", credentials=wrong))
    try:
        for _ in range(5):
            with pytest.raises(ReplicaError, match="alone"):
                store.latest(SESSION)
        assert rig.server.refused[Refusal.UNAUTHORIZED] == 5
        assert caplog.text.count("event=not_of_the_fleet remote=127.0.0.1") == 1
    finally:
        store.close()
        rig.close()


def raw(port: int, request: bytes) -> bytes:
    """Send bytes as they are and return what comes back before it is silent."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
                connection.settimeout(0.3)
    return bytes(answer)


def test_what_was_sent_once_is_not_believed_again(plain_node: ReplicaProcess, secret_fleet: Fleet) -> None:
    with wire_to(plain_node.port) as wire:
        store = plain_node.peer(secret_fleet, wire.port)
        write(store, range(2))
        write(store, range(3), OTHER)
        store.finish(SESSION)
        heard = bytes(wire.seen)
    finish = b"POST /midstream/v1/replicas/finish/"
    assert finish in heard
    fresh = plain_node.peer(secret_fleet)
    write(fresh, range(2), created_at=2000.0)
    # All of it again, word for word: nothing of it happens.
    answers = raw(plain_node.port, heard)
    assert b" 200 " not in answers
    assert answers.count(b" 401 ") >= 1
    assert b" 401 " in raw(plain_node.port, heard[heard.index(finish) :])
    assert {line.finished for line in fresh.list() if line.session == SESSION} == {False}


def test_a_credential_from_too_long_ago_or_ahead_is_refused(plain_node: ReplicaProcess) -> None:
    for off_s in (-31.0, 31.0, -86_400.0):
        header = signed("GET", f"{BASE}/list", now_s=time.time() + off_s)
        answer = raw(
            plain_node.port, f"GET {BASE}/list HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode()
        )
        assert b" 401 " in answer


def test_a_body_that_is_too_large_is_refused_before_it_is_read(plain_node: ReplicaProcess) -> None:
    target = f"{BASE}/drafts/{'1' * 32}"
    raw(plain_node.port, request("POST", target))
    size = CHUNK_BODY_BYTES_MAX + 1
    target = f"{BASE}/drafts/{'1' * 32}/chunks/{'0' * 32}"
    header = signed("PUT", target, b"")
    fields = header.split(":")
    fields[2] = str(size)
    # Signed for that size by one who has the secret.
    from midstream.sidecar.replicas.signatures import Claim, _mac

    claim = Claim(size, fields[3])
    fields[4] = _mac(SECRET, "PUT", target, int(fields[0].split()[-1]), fields[1], claim)
    head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nAuthorization: {':'.join(fields)}\r\n\r\n"
    before = rss_bytes(plain_node.process.pid)
    answer = raw(plain_node.port, head.encode() + b"x" * 1000)
    assert b" 413 " in answer
    assert rss_bytes(plain_node.process.pid) - before < 16 << 20


def test_a_body_without_a_length_or_of_another_length_is_refused(plain_node: ReplicaProcess) -> None:
    target = f"{BASE}/drafts/{'1' * 32}/keep"
    header = signed("POST", target, b"{}")
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nAuthorization: {header}\r\n\r\n"
    chunked = head + "2\r\n{}\r\n0\r\n\r\n"
    assert b" 400 " in raw(plain_node.port, chunked.encode())
    header = signed("POST", target, b"{}")
    longer = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nAuthorization: {header}\r\n\r\n{{}} "
    assert b" 400 " in raw(plain_node.port, longer.encode())


def request(method: str, target: str, body: bytes = b"") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Authorization: {signed(method, target, body)}\r\n\r\n".encode() + body


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_on_the_wire_never_get_in_nor_out(
    plain_node: ReplicaProcess, secret_fleet: Fleet, seed: int
) -> None:
    """Without TLS, which would notice each of them itself."""
    name, stored = random_chunk(200_000)
    with wire_to(plain_node.port) as wire:
        store = plain_node.peer(secret_fleet, wire.port)
        draft = store.begin()

        def flip(piece: bytes) -> bytes:
            at = (seed * 7919 + 1000) % len(piece)
            return piece[:at] + bytes([piece[at] ^ (1 << seed % 8)]) + piece[at + 1 :] if len(piece) > 2000 else piece

        wire.change_up = flip
        with pytest.raises(StoreError):
            draft.put_stored(name, stored)
        wire.change_up = lambda piece: piece
        assert not draft.keep(name)
        draft.put_stored(name, stored)
        wire.change_down = flip
        with pytest.raises(StoreError):
            store.get_stored(name)
        wire.change_down = lambda piece: piece
        assert store.get_stored(name) == stored
        draft.__exit__(None, None, None)


def test_what_is_not_the_block_of_its_name_is_refused_on_arrival(
    plain_node: ReplicaProcess, secret_fleet: Fleet
) -> None:
    name, _ = random_chunk(5000)
    other, stored = random_chunk(5000)
    # A header that proves itself, around a frame of another block: only unpacking it tells.
    forged = forge(name, stored)
    chunk.check(name, forged)
    draft = plain_node.peer(secret_fleet).begin()
    for wrong in (stored, forged, b"", b"MIDC", os.urandom(5000)):
        with pytest.raises((CorruptError, ReplicaError)):
            draft._store.ask("PUT", f"{draft.path}/chunks/{name}", wrong)
    assert not draft.keep(name)
    draft.put_stored(other, stored)
    assert draft.keep(other)


def forge(name: str, stored: bytes) -> bytes:
    import xxhash

    fields = bytearray(stored[:40])
    fields[16:32] = bytes.fromhex(name)
    frame = stored[48:]
    check = xxhash.xxh3_64_intdigest(frame, xxhash.xxh3_64_intdigest(bytes(fields)))
    return bytes(fields) + check.to_bytes(8, "little") + frame


def test_a_peer_that_is_killed_in_the_middle_of_a_chunk_costs_an_error_and_no_more(
    node: ReplicaProcess, fleet: Fleet
) -> None:
    name, stored = random_chunk(20 << 20)
    with wire_to(node.port) as wire:
        store = node.peer(fleet, wire.port)
        draft = store.begin()
        wire.bytes_per_s = 4 << 20
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            putting = pool.submit(draft.put_stored, name, stored)
            before = wire.up_bytes
            while wire.up_bytes < before + (1 << 20):
                time.sleep(0.01)
            node.kill()
            with pytest.raises(ReplicaError) as lost:
                putting.result(20)
        assert lost.value.reason is Refusal.UNREACHABLE
    again = start_replicas("--memory-bytes", str(MEMORY), *fleet.flags, peer=True, port=node.port)
    try:
        # One that was started anew has nothing, and says so.
        store = again.peer(fleet)
        assert store.latest(SESSION) is None
        with pytest.raises(ReplicaError):
            draft.publish(snapshot_of((name,)))
        assert write(store, range(2)) == store.latest(SESSION)
    finally:
        again.close()


def test_a_client_that_is_cut_off_in_the_middle_of_a_chunk_leaves_nothing(node: ReplicaProcess, fleet: Fleet) -> None:
    name, stored = random_chunk(4 << 20)
    with wire_to(node.port) as wire:
        store = node.peer(fleet, wire.port)
        draft = store.begin()
        wire.cut_after_bytes = wire.up_bytes + (2 << 20)
        with pytest.raises(ReplicaError):
            draft.put_stored(name, stored)
    other = node.peer(fleet)
    assert other.figures().size_bytes == 0
    with other.begin() as fresh:
        assert not fresh.keep(name)


def test_a_slow_wire_takes_its_time_and_one_that_is_too_slow_is_given_up(node: ReplicaProcess, fleet: Fleet) -> None:
    name, stored = random_chunk(3 << 20)
    with wire_to(node.port) as wire:
        draft = node.peer(fleet, wire.port).begin()
        wire.bytes_per_s = 4 << 20
        began = time.monotonic()
        draft.put_stored(name, stored)
        assert 0.6 < time.monotonic() - began < 8
    other, stored = random_chunk(1 << 20)
    with wire_to(node.port) as wire:
        draft = node.peer(fleet, wire.port, answer_s=1.0).begin()
        wire.bytes_per_s = 64 << 10
        began = time.monotonic()
        with pytest.raises(ReplicaError) as slow:
            draft.put_stored(other, stored)
        assert slow.value.reason is Refusal.SLOW
        assert time.monotonic() - began < 5


def test_a_full_peer_lets_finished_sessions_go_first_and_then_says_so(fleet: Fleet) -> None:
    node = start_replicas("--memory-bytes", str(1_000_000), *fleet.flags, peer=True)
    try:
        store = node.peer(fleet)
        sessions = [SessionId(f"{n:032x}") for n in range(1, 6)]

        def put(session: SessionId) -> None:
            with store.begin() as draft:
                name, stored = random_chunk(220_000)
                draft.put_stored(name, stored)
                draft.publish(snapshot_of((name,), session, created_at=time.time()))

        for session in sessions[:4]:
            put(session)
        with pytest.raises(ReplicaError) as full:
            put(sessions[4])
        assert full.value.reason is Refusal.FULL
        store.finish(sessions[1])
        put(sessions[4])
        assert [store.latest(session) is not None for session in sessions] == [True, False, True, True, True]
        assert store.figures().size_bytes <= 1_000_000
    finally:
        node.close()


def test_two_writers_of_one_session_and_only_the_newer_owner_counts(node: ReplicaProcess, fleet: Fleet) -> None:
    old, new = node.peer(fleet), node.peer(fleet)
    write(old, range(3), generation=1)
    newest = write(new, range(4), generation=2, created_at=1500.0)
    for count in range(5, 10):
        # Cut off by the fence, it does not know yet, and has even more to say.
        write(old, range(count), generation=1, created_at=2000.0 + count)
        assert old.latest(SESSION) == new.latest(SESSION) == newest
    assert [new.get_chunk(name) for name in newest.chunks] == [block(n) for n in range(4)]


def test_a_reader_that_does_not_read_is_broken_off(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ServedHere(fleet)
    try:
        name, stored = random_chunk(30 << 20)
        client = rig.client()
        with client.begin() as draft:
            draft.put_stored(name, stored)
            monkeypatch.setattr(peer_server, "BODY_S_MIN", 1.0)
            monkeypatch.setattr(peer_server, "BYTES_PER_S_MIN", 1 << 30)
            with wire_to(rig.port) as wire:
                store = PeerStore(Peer(f"https://127.0.0.1:{wire.port}", credentials=fleet.credentials), answer_s=4.0)
                assert store.latest(SESSION) is None
                wire.bytes_per_s = 20_000.0
                with pytest.raises(ReplicaError):
                    store.get_stored(name)
                wire.bytes_per_s = None
                store.close()
            assert rig.server.refused[Refusal.SLOW] == 1
            monkeypatch.undo()
            assert client.get_stored(name) == stored
    finally:
        rig.close()


def test_a_silent_connection_is_closed_and_there_is_a_bound_on_all(plain_node: ReplicaProcess) -> None:
    with socket.create_connection(("127.0.0.1", plain_node.port), timeout=30) as connection:
        connection.sendall(b"GET /midstream")
        began = time.monotonic()
        assert connection.recv(100) == b""
        assert 5 < time.monotonic() - began < 20


def test_a_draft_whose_client_is_gone_is_left_by_itself(fleet: Fleet) -> None:
    rig = ServedHere(fleet)
    try:
        draft = rig.client().begin()
        draft.put_chunk(block(1))
        assert rig.store.figures().size_bytes > 0
        import asyncio

        asyncio.run_coroutine_threadsafe(rig.server.leave_idle(time.monotonic() + 1), rig._loop).result(10)
        assert rig.store.figures().size_bytes == 0
        with pytest.raises(ReplicaError):
            draft.publish(snapshot_of((chunk.chunk_name(block(1)),)))
    finally:
        rig.close()


def test_no_word_of_a_client_makes_the_server_do_what_it_should_not(plain_node: ReplicaProcess) -> None:
    draft = "2" * 32
    assert b" 200 " in raw(plain_node.port, request("POST", f"{BASE}/drafts/{draft}"))
    for method, path, body in [
        ("POST", "/drafts/xyz", b""),
        ("POST", f"/drafts/{draft}/keep", b""),
        ("POST", f"/drafts/{draft}/keep", b"[]"),
        ("POST", f"/drafts/{draft}/keep", b'{"names": 1}'),
        ("POST", f"/drafts/{draft}/keep", b'{"names": ["../../x"]}'),
        ("POST", f"/drafts/{draft}/keep", b"[" * 100_000),
        ("POST", f"/drafts/{'3' * 32}/keep", b'{"names": []}'),
        ("PUT", f"/drafts/{draft}/chunks/..", b""),
        ("PUT", f"/drafts/{draft}/chunks/{'g' * 32}", b"x"),
        ("POST", f"/drafts/{draft}/publish", b""),
        ("POST", f"/drafts/{draft}/publish", b"midstream-manifest 00\n{}\n"),
        ("GET", "/latest/xyz", b""),
        ("GET", "/chunks/xyz", b""),
        # What others have here goes when there is no room, at nobody's word.
        ("DELETE", f"/sessions/{SESSION}", b""),
        ("POST", "/sweep", b""),
        ("PATCH", "/list", b""),
    ]:
        answer = raw(plain_node.port, request(method, BASE + path, body))
        status = int(answer.split(b" ", 2)[1])
        assert 400 <= status < 500, (method, path, status)
    assert plain_node.process.poll() is None
