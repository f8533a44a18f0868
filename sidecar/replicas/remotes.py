"""Stores elsewhere as they are named in the configuration, and how each is opened.

    peer://HOST:PORT                                     a node that keeps snapshots for others
    mooncake://HOST:PORT?host=THIS&protocol=rdma&devices=mlx5_0&copies=2&admin=http://HOST:9003&segment=BYTES
    s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME

Each may have `every=SECONDS`: a session that is there is not sent again within that time (s3: 60, for each snapshot is
several requests that are counted; the others: 0).

Owns the names. Invariant: what `parse_remotes` returns can be opened as far as its name tells; nothing is asked before
`open_remote`.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ...session.errors import ConfigError
from .contract import Objects, ReplicaStore
from .courier import RECHECK_S
from .credentials import Credentials
from .mooncake_objects import Mooncake, MooncakeObjects
from .object_names import Names
from .object_store import ObjectStore
from .peer_store import Peer, PeerStore
from .s3_objects import S3Objects

REMOTES_MAX = 2
PREFIX = "midstream/1/"
# What was put into a bucket stays there, unless somebody removes it.
S3_TRUST_S = 3600.0


class Kind(StrEnum):
    """What is spoken there."""

    PEER = "peer"
    MOONCAKE = "mooncake"
    S3 = "s3"


_OPTIONS: Mapping[Kind, frozenset[str]] = {
    Kind.PEER: frozenset({"every"}),
    Kind.MOONCAKE: frozenset({"every", "host", "metadata", "protocol", "devices", "copies", "admin", "segment"}),
    Kind.S3: frozenset({"every", "endpoint", "region"}),
}


@dataclass(frozen=True, slots=True)
class Remote:
    """One store elsewhere. `name` is for metrics and logs."""

    name: str
    kind: Kind
    place: str
    folder: str
    options: Mapping[str, str]

    @property
    def every_s(self) -> float:
        """How long a session that is there is not sent again."""
        return float(self.options.get("every", "60" if self.kind is Kind.S3 else "0"))

    @property
    def recheck_s(self) -> float:
        """After how long it is looked whether a session is still there."""
        return S3_TRUST_S if self.kind is Kind.S3 else RECHECK_S


@dataclass(frozen=True, slots=True)
class Means:
    """What this node opens stores with. `bytes_max`: of all that it keeps in one of them."""

    writer: str
    bytes_max: int
    credentials: Credentials | None = None
    mooncake_python: Path | None = None


def parse_remotes(text: str) -> tuple[Remote, ...]:
    """The stores that a setting names, with commas between. ValueError says which part is wrong."""
    found: list[Remote] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        url = urlsplit(part)
        if url.scheme not in list(Kind):
            raise ValueError(f"{part}: expected peer://, mooncake:// or s3://")
        kind = Kind(url.scheme)
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
        unknown = options.keys() - _OPTIONS[kind]
        if unknown:
            raise ValueError(f"{part}: {kind} has no {', '.join(sorted(unknown))}; it has {sorted(_OPTIONS[kind])}")
        if not url.hostname or url.username or url.fragment or (kind is not Kind.S3 and (url.port is None or url.path)):
            raise ValueError(f"{part}: expected {'a bucket' if kind is Kind.S3 else 'HOST:PORT'} after {kind}://")
        for number in ("copies", "segment", "every"):
            if not options.get(number, "1").isdecimal():
                raise ValueError(f"{part}: {number} is a number")
        name = f"{kind}{2 if any(other.kind is kind for other in found) else ''}"
        found.append(Remote(name, kind, url.netloc, url.path.strip("/"), options))
    if len(found) > REMOTES_MAX:
        raise ValueError(f"{len(found)} stores are too many; {REMOTES_MAX} at most")
    return tuple(found)


def check_means(remotes: tuple[Remote, ...], means: Means) -> None:
    """ConfigError when something is missing that a store needs."""
    for remote in remotes:
        if remote.kind is Kind.PEER and means.credentials is None:
            raise ConfigError(
                f"peer://{remote.place} answers nodes of its fleet alone; set replicas.secret_file or certificates"
            )
        if remote.kind is Kind.S3 and importlib.util.find_spec("boto3") is None:
            raise ConfigError('snapshots in S3 need boto3; pip install "midstream[s3]"')
        if remote.kind is Kind.MOONCAKE and (means.mooncake_python is None or not means.mooncake_python.is_file()):
            raise ConfigError(
                f"{means.mooncake_python}: is no interpreter; set replicas.mooncake_python to one that has "
                "mooncake-transfer-engine installed"
            )


def peer_at(listen: str, node_url: str) -> str:
    """The URL of what listens there, as other nodes reach it; a node that listens everywhere has its own address."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    if bare in ("", "0.0.0.0", "::"):
        bare = urlsplit(node_url).hostname or ""
    return f"peer://[{bare}]:{port}" if ":" in bare else f"peer://{bare}:{port}"


def open_remote(remote: Remote, means: Means) -> ReplicaStore:
    """Open a store. ReplicaError when it does not answer."""
    if remote.kind is Kind.PEER:
        is_tls = means.credentials is not None and means.credentials.client is not None
        return PeerStore(Peer(f"http{'s' if is_tls else ''}://{remote.place}", credentials=means.credentials))
    objects: Objects
    prefix, trust_s = PREFIX, 0.0
    if remote.kind is Kind.S3:
        objects = S3Objects(remote.place, endpoint=remote.options.get("endpoint"), region=remote.options.get("region"))
        prefix = f"{remote.folder}/{PREFIX}" if remote.folder else PREFIX
        trust_s = S3_TRUST_S
    else:
        assert means.mooncake_python is not None
        objects = MooncakeObjects(_mooncake(remote, means.mooncake_python))
    try:
        return ObjectStore(objects, Names(prefix, means.writer), bytes_max=means.bytes_max, trust_s=trust_s)
    except BaseException:
        objects.close()
        raise


def _mooncake(remote: Remote, python: Path) -> Mooncake:
    options = remote.options
    return Mooncake(
        master=remote.place,
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        host=options.get("host", "127.0.0.1"),
        protocol=options.get("protocol", "tcp"),
        devices=options.get("devices", ""),
        segment_bytes=int(options.get("segment", "0")),
        copies=max(1, int(options.get("copies", "1"))),
        admin=options.get("admin"),
        python=python,
    )
