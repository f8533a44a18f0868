"""Rates of stores elsewhere, and how far behind they are under load: prints the table of docs/benchmarks.md.

    PYTHONPATH=tests .venv/bin/python tests/replicas/measure.py

Everything on this machine, over loopback: the peer, S3's and Mooncake's servers are processes of their own. Blocks are
random bytes, which zstd makes no smaller.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from contracts.store_suite import snapshot_of
from replicas.test_s3 import start as start_s3

from midstream.session import chunk
from midstream.session.disk_store import DiskStore
from midstream.session.ids import SessionId
from midstream.sidecar.replicas.contract import ReplicaStore
from midstream.sidecar.replicas.mooncake_objects import MooncakeObjects
from midstream.sidecar.replicas.object_names import Names
from midstream.sidecar.replicas.object_store import ObjectStore
from midstream.sidecar.replicas.s3_objects import S3Objects
from support.mooncakes import Deployment, python
from support.peers import make_fleet, start_replicas

BLOCK_BYTES = 2 << 20
BLOCKS = 96
ROUNDS = 3
SENDERS, READERS = 4, 16


@contextlib.contextmanager
def peer(folder: Path, **how: object) -> Iterator[ReplicaStore]:
    fleet = make_fleet(folder, **how)  # type: ignore[arg-type]
    process = start_replicas("--memory-bytes", str(4 << 30), *fleet.flags, peer=True)
    try:
        yield process.peer(fleet)
    finally:
        process.close()


@contextlib.contextmanager
def s3() -> Iterator[ReplicaStore]:
    os.environ |= {"AWS_ACCESS_KEY_ID": "t", "AWS_SECRET_ACCESS_KEY": "t"}
    server = start_s3()
    client = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    client.create_bucket(Bucket="bench")
    try:
        objects = S3Objects("bench", endpoint=server.url, region="us-east-1")
        yield ObjectStore(objects, Names("", "n"), bytes_max=8 << 30, trust_s=3600.0)
    finally:
        server.process.kill()
        server.process.wait()


@contextlib.contextmanager
def mooncake() -> Iterator[ReplicaStore]:
    deployment = Deployment()
    deployment.start_master()
    deployment.lend(3 << 30)
    objects = MooncakeObjects(deployment.config(admin=None))
    try:
        yield ObjectStore(objects, Names("", "n"), bytes_max=8 << 30)
    finally:
        objects.close()
        deployment.close()


def rates(store: ReplicaStore) -> tuple[list[float], list[float], list[float]]:
    """MB/s written and read, and milliseconds for a snapshot of which one block in 96 is new; of each round."""
    written, read, published_ms = [], [], []
    for number in range(ROUNDS):
        blocks = [chunk.encode(os.urandom(BLOCK_BYTES)) for _ in range(BLOCKS)]
        names = tuple(name for name, _ in blocks)
        session = SessionId(f"{number + 1:032x}")
        with store.begin() as draft, ThreadPoolExecutor(SENDERS) as senders:
            began = time.monotonic()
            list(senders.map(lambda block, draft=draft: draft.put_stored(*block), blocks))  # type: ignore[misc]
            written.append(BLOCKS * BLOCK_BYTES / (time.monotonic() - began) / 1e6)
            draft.publish(snapshot_of(names, session))
        with ThreadPoolExecutor(READERS) as readers:
            began = time.monotonic()
            assert store.latest(session) is not None
            assert sum(len(raw) for raw in readers.map(store.get_chunk, names)) == BLOCKS * BLOCK_BYTES
            read.append(BLOCKS * BLOCK_BYTES / (time.monotonic() - began) / 1e6)
        tail = chunk.encode(os.urandom(BLOCK_BYTES))
        began = time.monotonic()
        with store.begin() as draft:
            draft.keep_all(names)
            draft.put_stored(*tail)
            draft.publish(snapshot_of((*names, tail[0]), session, created_at=2000.0))
        published_ms.append((time.monotonic() - began) * 1e3)
        store.finish(session)
    return written, read, published_ms


def through(folder: Path) -> str:
    """What a mover gets: a peer's blocks by way of this node's own process."""
    fleet = make_fleet(folder)
    there = start_replicas("--memory-bytes", str(4 << 30), *fleet.flags, peer=True)
    here = start_replicas("--to", f"peer://127.0.0.1:{there.port}", *fleet.flags)
    store, local = there.peer(fleet), here.local()
    read, asked_ms = [], []
    for number in range(ROUNDS):
        session = SessionId(f"{number + 1:032x}")
        with store.begin() as draft:
            names = tuple(draft.put_chunk(os.urandom(BLOCK_BYTES)) for _ in range(BLOCKS))
            draft.publish(snapshot_of(names, session))
        began = time.monotonic()
        while local.latest(session) is None:
            time.sleep(0.05)
            began = time.monotonic()
        asked_ms.append((time.monotonic() - began) * 1e3)
        with ThreadPoolExecutor(READERS) as readers:
            began = time.monotonic()
            assert sum(len(raw) for raw in readers.map(local.get_chunk, names)) == BLOCKS * BLOCK_BYTES
            read.append(BLOCKS * BLOCK_BYTES / (time.monotonic() - began) / 1e6)
        store.finish(session)
    here.close()
    there.close()
    cells = [" / ".join(f"{value:.0f}" for value in values) for values in (read, asked_ms)]
    return f"| peer, as a mover reads it | | {cells[0]} | asked in {cells[1]} |"


def lag(bytes_per_s: int, sessions: int = 16, seconds: float = 20.0, every_s: float = 0.25) -> str:
    """How far behind a peer is while `sessions` grow by a block each `every_s`, under a budget."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = make_fleet(folder / "fleet")
        there = start_replicas("--memory-bytes", str(4 << 30), *fleet.flags, peer=True)
        here = start_replicas(
            "--store", str(folder / "store"), "--to", f"peer://127.0.0.1:{there.port}", *fleet.flags,
            "--bytes-per-s", str(bytes_per_s),
        )  # fmt: skip
        disk = DiskStore(folder / "store")
        local = here.local()
        tokens: list[float] = []
        ages: list[float] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.2):
                told = local.json("GET", "/status")
                tokens.append(told["peer_lag_tokens"])
                ages.append(told["peer_lag_seconds_max"])

        looking = threading.Thread(target=look)
        looking.start()
        kept: dict[int, tuple[str, ...]] = {}
        began = time.monotonic()
        rounds = 0
        while time.monotonic() - began < seconds:
            rounds += 1
            for number in range(sessions):
                with disk.begin() as draft:
                    names = kept.get(number, ())
                    assert all(draft.keep(chunk_name) for chunk_name in names)
                    kept[number] = (*names, draft.put_chunk(os.urandom(256 << 10)))
                    session = SessionId(f"{number + 1:032x}")
                    draft.publish(snapshot_of(kept[number], session, created_at=time.time()))
            time.sleep(max(0.0, began + rounds * every_s - time.monotonic()))
        took_s = time.monotonic() - began
        made = rounds * sessions * (256 << 10) / took_s / 1e6
        over.set()
        looking.join()
        sent = local.json("GET", "/status")["peer_bytes_sent"] / took_s / 1e6
        disk.close()
        here.close()
        there.close()
    steady = tokens[len(tokens) // 3 :]
    return (
        f"| {bytes_per_s / 1e6:.0f} MB/s | {made:.1f} MB/s | {sent:.1f} MB/s | "
        f"{statistics.median(steady):.0f} / {max(steady):.0f} | "
        f"{statistics.median(ages[len(ages) // 3 :]):.1f} / {max(ages):.1f} s |"
    )


def row(name: str, store: ReplicaStore) -> str:
    written, read, published_ms = rates(store)
    cells = [" / ".join(f"{value:.0f}" for value in values) for values in (written, read, published_ms)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print both tables."""
    folder = Path(tempfile.mkdtemp())
    stores: list[tuple[str, Callable[[], contextlib.AbstractContextManager[ReplicaStore]]]] = [
        ("peer, TLS both ways and secret", lambda: peer(folder / "a")),
        ("peer, TLS both ways", lambda: peer(folder / "b", secret=None)),
        ("peer, secret alone (loopback)", lambda: peer(folder / "c", tls=False)),
        ("S3 (moto's server)", s3),
    ]
    if python() is not None:
        stores.append(("Mooncake Store, TCP", mooncake))
    for name, opened in stores:
        with opened() as store:
            print(row(name, store), flush=True)
            store.close()
    print(through(folder / "d"), flush=True)
    for bytes_per_s in (125_000_000, 8_000_000):
        print(lag(bytes_per_s), flush=True)


if __name__ == "__main__":
    sys.exit(main())
