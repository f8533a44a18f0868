"""A bucket: a real server that speaks S3 (moto's), in a process of its own."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import boto3
import pytest
from contracts.store_suite import SESSION, StoreContract, block, write

from midstream.session import chunk
from midstream.session.errors import StoreError
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.remotes import Means, open_remote, parse_remotes
from midstream.sidecar.replicas.s3_objects import S3Objects
from support.peers import wire_to

BUCKET = "snapshots"


@dataclass(slots=True)
class S3:
    process: "subprocess.Popen[bytes]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def start(port: int = 0) -> S3:
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return S3(process, port)
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    s3 = start()
    yield s3
    s3.process.kill()
    s3.process.wait()


@pytest.fixture
def bucket(server: S3) -> Iterator[str]:
    name = f"{BUCKET}-{time.time_ns()}"
    client = boto3.client(
        "s3", endpoint_url=server.url, region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t"
    )
    client.create_bucket(Bucket=name)
    yield name
    client.close()


@pytest.fixture
def opened(server: S3, bucket: str) -> Iterator[Callable[[str], ObjectStore]]:
    stores: list[ObjectStore] = []

    def open_(writer: str = "node-a", url: str | None = None) -> ObjectStore:
        objects = S3Objects(bucket, endpoint=url or server.url, region="us-east-1")
        stores.append(ObjectStore(objects, Names("fleet/", writer), bytes_max=1 << 30))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[..., ObjectStore]) -> ObjectStore:
    return opened()


@pytest.fixture
def reopen(opened: Callable[..., ObjectStore]) -> Callable[[], ObjectStore]:
    return opened


@pytest.fixture
def damage(server: S3, bucket: str) -> Callable[..., None]:
    objects = S3Objects(bucket, endpoint=server.url, region="us-east-1")

    def damage(name: str, *, gone: bool = False) -> None:
        place = f"fleet/chunks/node-a/{name}"
        stored = objects.get(place, 1 << 30)
        assert stored is not None
        if gone:
            objects.remove([place])
        else:
            objects.replace(place, stored[:-3] + bytes([stored[-3] ^ 1]) + stored[-2:])

    return damage


class TestContract(StoreContract):
    """What every store must do."""


def test_a_snapshot_whose_objects_were_removed_by_others_is_not_offered(
    store: ObjectStore, opened: Callable[..., ObjectStore], damage: Callable[..., None]
) -> None:
    older = write(store, range(3))
    newer = write(store, range(4), created_at=2000.0)
    damage(newer.chunks[3], gone=True)
    assert opened("node-b").latest(SESSION) == older


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there_are_refusals(server: S3) -> None:
    with pytest.raises(ReplicaError) as missing:
        ObjectStore(S3Objects("nowhere", endpoint=server.url, region="us-east-1"), Names("", "n"), bytes_max=1)
    assert missing.value.reason is Refusal.INTERNAL
    with pytest.raises(ReplicaError) as missing:
        ObjectStore(S3Objects("b", endpoint="http://127.0.0.1:1", region="us-east-1"), Names("", "n"), bytes_max=1)
    assert missing.value.reason is Refusal.UNREACHABLE


def test_a_wire_that_is_cut_in_the_middle_of_an_object_leaves_no_half(
    server: S3, opened: Callable[..., ObjectStore]
) -> None:
    manifest = write(opened(), range(3))
    with wire_to(server.port) as wire:
        store = opened("node-a", f"http://127.0.0.1:{wire.port}")
        name, stored = chunk.encode(bytes(range(256)) * 8000)
        wire.cut_after_bytes = wire.up_bytes + len(stored) // 2
        with pytest.raises(StoreError), store.begin() as draft:
            draft.put_stored(name, stored)
        wire.cut_after_bytes = None
        assert store.latest(SESSION) == manifest
    with pytest.raises(StoreError):
        opened().get_stored(name)


def test_bits_that_flip_on_their_way_are_noticed(server: S3, opened: Callable[..., ObjectStore]) -> None:
    manifest = write(opened(), range(3), created_at=1000.0)
    with wire_to(server.port) as wire:
        store = opened("node-b", f"http://127.0.0.1:{wire.port}")
        assert store.latest(SESSION) == manifest
        wire.change_down = lambda piece: piece[:-2] + bytes([piece[-2] ^ 8]) + piece[-1:] if b"MIDC" in piece else piece
        with pytest.raises(StoreError):
            store.get_chunk(manifest.chunks[0])
        wire.change_down = lambda piece: piece
        # What is at rest was good, so nothing was lost but this one, which the writer puts again.
        assert [store.get_chunk(name) for name in manifest.chunks[1:]] == [block(1), block(2)]


def test_a_server_that_is_killed_in_the_middle_is_a_refusal_and_no_hang() -> None:
    s3 = start()
    client = boto3.client("s3", endpoint_url=s3.url, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    client.close()
    store = ObjectStore(S3Objects(BUCKET, endpoint=s3.url, region="us-east-1"), Names("", "n"), bytes_max=1 << 30)
    write(store, range(2))
    stopped = threading.Timer(0.2, lambda: s3.process.send_signal(signal.SIGKILL))
    stopped.start()
    began = time.monotonic()

    def write_on() -> None:
        for count in range(3, 3000):
            write(store, range(count, count + 1), created_at=1000.0 + count)

    with pytest.raises(StoreError):
        write_on()
    assert time.monotonic() - began < 30
    s3.process.wait()
    store.close()


def test_it_is_opened_by_its_url(server: S3, bucket: str) -> None:
    [remote] = parse_remotes(f"s3://{bucket}/cold/kv?endpoint={server.url}&region=us-east-1")
    store = open_remote(remote, Means("node-x", 1 << 30))
    manifest = write(store, range(2))
    assert store.latest(SESSION) == manifest
    keys = S3Objects(bucket, endpoint=server.url, region="us-east-1").list("cold/kv/midstream/1/", 100)
    assert keys is not None
    assert len(keys) == 4
    store.close()
