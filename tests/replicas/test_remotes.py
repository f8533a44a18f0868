"""Stores elsewhere as they are named, what is missing to open them, and the process that is kept for them."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest

from midstream.session.errors import ConfigError
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.sidecar.config import Fleet, Replicas
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.replicas import keeper
from midstream.sidecar.replicas.chain import LIMIT_S, PATIENCE_S, PAUSE_S, Chain
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.credentials import CredentialFiles, read_credentials
from midstream.sidecar.replicas.keeper import ReplicasKeeper
from midstream.sidecar.replicas.remotes import Kind, Means, check_means, parse_remotes, peer_at
from support.peers import make_fleet

SESSION = SessionId("5" * 32)


def test_each_kind_of_store_has_its_name_its_place_and_its_options() -> None:
    first, second = parse_remotes("peer://10.0.0.2:8810, s3://bucket/a/b/?endpoint=http://x:9&region=eu")
    assert (first.name, first.kind, first.place, first.every_s) == ("peer", Kind.PEER, "10.0.0.2:8810", 0)
    assert (second.name, second.place, second.folder) == ("s3", "bucket", "a/b")
    assert (second.options["endpoint"], second.every_s) == ("http://x:9", 60)
    [cake] = parse_remotes("mooncake://m:50051?host=10.0.0.1&protocol=rdma&devices=mlx5_0&copies=2&every=5")
    assert (cake.kind, cake.options["copies"], cake.every_s) == (Kind.MOONCAKE, "2", 5)
    assert [r.name for r in parse_remotes("peer://a:1,peer://b:2")] == ["peer", "peer2"]
    assert parse_remotes("") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://a:1", "expected peer://"),
        ("a:1", "expected peer://"),
        ("peer://a", "HOST:PORT"),
        ("peer://a:1/x", "HOST:PORT"),
        ("peer://user:pw@a:1", "HOST:PORT"),
        ("s3://", "a bucket"),
        ("peer://a:1?copies=2", "has no copies"),
        ("mooncake://a:1?copies=two", "is a number"),
        ("peer://a:1,peer://b:1,peer://c:1", "too many"),
    ],
)
def test_what_is_no_store_is_said_to_be_none(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_remotes(text)


def test_what_is_missing_to_open_a_store_is_said_before_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nodes of its fleet alone"):
        check_means(parse_remotes("peer://a:1"), Means("n", 1))
    with pytest.raises(ConfigError, match="no interpreter"):
        check_means(parse_remotes("mooncake://a:1"), Means("n", 1, mooncake_python=tmp_path / "none"))
    check_means(parse_remotes("mooncake://a:1"), Means("n", 1, mooncake_python=Path(sys.executable)))


def test_credentials_that_do_not_suffice_are_refused(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path / "fleet")
    files = fleet.files
    assert read_credentials(CredentialFiles()) is None
    with pytest.raises(ConfigError, match="needs its key"):
        read_credentials(CredentialFiles(certificate=files.certificate))
    with pytest.raises(ConfigError, match="who may ask"):
        read_credentials(CredentialFiles(certificate=files.certificate, key=files.key))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_credentials(CredentialFiles(certificate=files.key, key=files.key, ca=files.ca))
    assert files.secret is not None
    files.secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credentials(files)
    files.secret.chmod(0o600)
    files.secret.write_text("short")
    with pytest.raises(ConfigError, match="no secret"):
        read_credentials(files)
    with pytest.raises(ConfigError, match="give a file"):
        read_credentials(CredentialFiles(secret=tmp_path / "none"))
    found = read_credentials(CredentialFiles(certificate=files.certificate, key=files.key, ca=files.ca))
    assert found is not None
    assert found.is_mutual
    assert "secret" not in repr(found)


def test_a_store_elsewhere_needs_one_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.dir"):
        keeper.command(Replicas(to="peer://a:1"), Fleet(), tmp_path, None)
    with pytest.raises(ConfigError, match=r"replicas\.to"):
        keeper.command(Replicas(to="ftp://a:1"), Fleet(), tmp_path, "/store")
    words = keeper.command(Replicas(to="peer://a:1", memory_bytes=5), Fleet(name="Node_A.x"), tmp_path, "/store")
    assert words[words.index("--writer") + 1] == "node-a.x"
    assert words[words.index("--store") + 1] == "/store"
    assert "--listen" not in words
    assert not keeper.is_wanted(Replicas())


async def test_a_process_that_does_not_start_is_tried_again_and_is_no_reason_to_fail(tmp_path: Path) -> None:
    kept = ReplicasKeeper([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "s")
    keeping = asyncio.create_task(kept.keep())
    deadline = time.monotonic() + 20
    while kept.restarts < 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await kept.status() is None
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    kept.stop()


async def test_figures_of_a_process_that_runs_become_metrics_and_its_silence_shows(tmp_path: Path) -> None:
    words = keeper.command(Replicas(memory_bytes=1 << 20), Fleet(name="n"), tmp_path, None)
    kept = ReplicasKeeper(words, tmp_path / keeper.SOCKET)
    keeping = asyncio.create_task(kept.keep())
    metrics = Metrics()
    assert b"midstream_replicas" not in metrics.render()
    deadline = time.monotonic() + 30
    while (status := await kept.status()) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    metrics.set_replicas(status)
    assert b"midstream_replicas_up 1.0" in metrics.render()
    assert b"midstream_replicas_memory_bytes 0.0" in metrics.render()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await asyncio.to_thread(kept.stop)
    metrics.set_replicas(await kept.status())
    assert b"midstream_replicas_up 0.0" in metrics.render()


class Answering:
    """A store that says what it is told to."""

    def __init__(self, error: ReplicaError | None = None) -> None:
        self.error = error
        self.asked = 0

    def latest(self, session: SessionId) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error

    def get_stored(self, name: str) -> bytes:
        self.asked += 1
        raise self.error or ReplicaError(Refusal.MISSING, "not here")


def test_a_store_that_fails_is_left_alone_for_a_while_and_the_others_are_asked() -> None:
    now_s = [100.0]
    down, well = Answering(ReplicaError(Refusal.UNREACHABLE, "down")), Answering()
    chain = Chain([("down", lambda: down), ("well", lambda: well), ("closed", lambda: None)], clock=lambda: now_s[0])
    assert chain.latest(SESSION) is None
    assert chain.latest(SESSION) is None
    assert (down.asked, well.asked) == (1, 2)
    now_s[0] += PAUSE_S
    chain.latest(SESSION)
    assert (down.asked, well.asked) == (2, 3)
    assert chain.counts["failed_down"] == 2
    # One that has not got a block has done nothing wrong.
    with pytest.raises(ReplicaError):
        chain.get_stored("0" * 32)
    chain.latest(SESSION)
    assert well.asked == 5


MANIFEST = Manifest(
    session=SESSION, generation=1, key={}, fingerprint="a" * 32, block_tokens=16, block_bytes=1024, prompt_len=5,
    prompt_hash="b" * 32, kv_len=5, outputs=(7,), chunks=("c" * 32,), created_at=1.0,
)  # fmt: skip


class Silent:
    """A store on a host that is gone: what is asked of it gets no answer."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.asked = 0

    def latest(self, session: SessionId) -> None:
        self.asked += 1
        self.gone.wait(30)

    def get_stored(self, name: str) -> bytes:
        raise AssertionError("it was not offered")


class Having:
    """A store that has a snapshot of every session."""

    def latest(self, session: SessionId) -> Manifest:
        return MANIFEST

    def get_stored(self, name: str) -> bytes:
        return name.encode()


def test_a_store_that_says_nothing_holds_nobody_up_where_another_has_the_session() -> None:
    silent = Silent()
    try:
        chain = Chain([("silent", lambda: silent), ("near", lambda: Having())])
        began_s = time.monotonic()
        assert chain.latest(SESSION) == MANIFEST
        assert time.monotonic() - began_s < PATIENCE_S + 1
        # Nor is it asked again for a while.
        assert chain.latest(SESSION) == MANIFEST
        assert silent.asked == 1
        assert chain.counts["failed_silent"] == 1
    finally:
        silent.gone.set()


def test_stores_that_all_say_nothing_are_waited_for_for_less_than_a_restore_waits() -> None:
    silent, another = Silent(), Silent()
    try:
        chain = Chain([("silent", lambda: silent), ("another", lambda: another)])
        began_s = time.monotonic()
        assert chain.latest(SESSION) is None
        assert LIMIT_S - 0.1 < time.monotonic() - began_s < 3.0
    finally:
        silent.gone.set()
        another.gone.set()


def test_other_nodes_reach_what_listens_everywhere_by_the_nodes_own_address() -> None:
    assert peer_at("10.0.0.7:8900", "http://10.0.0.1:8800") == "peer://10.0.0.7:8900"
    assert peer_at("0.0.0.0:8900", "http://10.0.0.1:8800") == "peer://10.0.0.1:8900"
    assert peer_at("[::]:8900", "https://[fd00::1]:8800") == "peer://[fd00::1]:8900"
    assert parse_remotes(peer_at("[fd00::2]:8900", ""))[0].place == "[fd00::2]:8900"
