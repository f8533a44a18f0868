"""What can be set, in which range, and what it is when nobody sets it.

Owns the settings and their documentation (`docs/configuration.md` is checked against it). Invariant: a `Settings` that
exists is valid, field by field and as a whole. Does not read anything: flags, variables and files are `config_load.py`.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ..session.errors import ConfigError
from ..session.ids import worker_name


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of settings."""


class Listen(_Part, frozen=True):
    """Where clients connect."""

    host: Annotated[
        str, Meta(min_length=1, description="Address to listen on; beyond loopback only if you say so.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="TCP port; 0 takes a free one.")] = 8800


class WorkerUrl(_Part, frozen=True):
    """One engine that somebody else started."""

    name: str
    url: str


class Engine(_Part, frozen=True):
    """Engines that midstream starts itself (`midstream run`)."""

    worker_count: Annotated[
        int, Meta(ge=1, le=64, description="Engines to start from the command line after `--`.")
    ] = 1


class Arena(_Part, frozen=True):
    """Shared memory for journals and block tables: one file for each start of a worker."""

    slot_count: Annotated[int, Meta(ge=1, le=65_536, description="Sessions that one worker can have in flight.")] = 256
    page_count: Annotated[
        int, Meta(ge=16, le=1_048_576, description="Pages of 4 KiB (510 tokens or blocks each), for all of them.")
    ] = 16_384


class Store(_Part, frozen=True):
    """Snapshots on disk, for what must outlive a reboot or the machine."""

    dir: Annotated[str | None, Meta(description="Folder for snapshots; null keeps none on disk.")] = None
    bytes_max: Annotated[
        int, Meta(ge=1 << 20, le=1 << 50, description="Disk space for snapshots; the oldest finished go first.")
    ] = 8 << 30
    snapshot_every_s: Annotated[float, Meta(gt=0, le=86_400, description="How often full blocks are copied.")] = 1.0
    tail_every_tokens: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many tokens may be missing from a snapshot's tail.")
    ] = 64


class Tier1(_Part, frozen=True):
    """Copies of KV in memory of the host, for what the engine's own memory does not survive (docs/tier1.md)."""

    bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 44, description="Host memory for copies of full blocks; 0 keeps none, else at least 1 MiB."),
    ] = 0
    bandwidth: Annotated[
        int, Meta(ge=1 << 20, le=1 << 44, description="Bytes a second that copying into it may take of the link.")
    ] = 10_000_000_000
    tail: Annotated[
        str,
        Meta(
            pattern="^(never|[1-9][0-9]{0,5})$",
            title="never, or a number of tokens",
            description="After how many new tokens a block that is not full yet is copied, too.",
        ),
    ] = "never"


class Proxy(_Part, frozen=True):
    """What clients see."""

    body_bytes_max: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Largest request body; a larger one is answered with 413.")
    ] = 32 << 20
    keepalive_s: Annotated[
        float, Meta(gt=0, le=3600, description="How often a waiting stream gets an SSE comment.")
    ] = 5.0
    policy: Annotated[
        Literal["exact", "best-effort", "off"],
        Meta(description="How exact a session has to be, where a request's X-Midstream-Policy does not say."),
    ] = "best-effort"
    takeovers_max: Annotated[int, Meta(ge=0, le=1000, description="How often one session may be taken up again.")] = 8
    fruitless_takeovers_max: Annotated[
        int,
        Meta(ge=0, le=1000, description="How often in a row without a new token; then the request is refused."),
    ] = 2
    choices_max: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Choices (n, times prompts) of one request that can each be a session."),
    ] = 128
    stall_floor_s: Annotated[
        float, Meta(gt=0, le=300, description="A stream that is silent for less is never stalled, nor an engine hung.")
    ] = 15.0
    stall_factor: Annotated[
        float, Meta(ge=1, le=10_000, description="Silence counts as a stall beyond this many of its own token times.")
    ] = 20.0
    assign_seed: Annotated[
        bool,
        Meta(description="Give sampled requests without a seed one of ours, so that they too can go on exactly."),
    ] = True
    reattach_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="How long a stream is kept for a client that lost its connection; 0: not."),
    ] = 0.0
    reattach_stream_bytes_max: Annotated[
        int, Meta(ge=1 << 16, le=1 << 30, description="What is kept of one such stream.")
    ] = 1 << 20
    reattach_bytes_max: Annotated[
        int, Meta(ge=1 << 20, le=1 << 40, description="What is kept of all of them together.")
    ] = 256 << 20
    reattach_streams_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many are kept; further ones cannot be come back to.")
    ] = 10_000


class Restore(_Part, frozen=True):
    """How long a session may wait for its next worker."""

    takeover_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Time for a worker to come up before the session is refused.")
    ] = 600.0
    load_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Time for KV to be copied before it is recomputed instead.")
    ] = 10.0
    tiers: Annotated[
        str,
        Meta(
            pattern="^(none|(in-place|held|memory|disk|replica)(,(in-place|held|memory|disk|replica))*)$",
            title="some of in-place,held,memory,disk,replica with commas between, or none",
            description="Where KV may come from; without one of them a session is recomputed.",
        ),
    ] = "in-place,held,memory,disk,replica"


class Supervise(_Part, frozen=True):
    """How engines are started, stopped and started again (`midstream run`)."""

    start_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Time for an engine to answer its health check.")
    ] = 900.0
    stop_timeout_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="At the end: time for sessions to end, then for engines before SIGKILL."),
    ] = 30.0
    restart_backoff_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Wait before the second restart in a window; doubled for each more."),
    ] = 1.0
    restarts_max: Annotated[
        int, Meta(ge=0, le=100_000, description="Restarts in a window; one more and the worker has failed.")
    ] = 5
    restarts_window_s: Annotated[float, Meta(gt=0, le=86_400, description="Length of that window.")] = 600.0


class Fleet(_Part, frozen=True):
    """What this sidecar, or gateway, shares with the others of its fleet (docs/fleet.md)."""

    name: Annotated[str | None, Meta(description="This node's name in the fleet; null takes that of its host.")] = None
    url: Annotated[
        str | None,
        Meta(description="Where others of the fleet reach this node; null: what it listens on, if that is an address."),
    ] = None
    secret_file: Annotated[
        str | None,
        Meta(description="File with the secret that all of a fleet share; null: this node takes nothing of a gateway."),
    ] = None
    coordination: Annotated[
        Literal["none", "etcd", "kubernetes"],
        Meta(description="The service that says who is alive and who may take a session up; none: this process alone."),
    ] = "none"
    group: Annotated[
        str, Meta(min_length=1, max_length=63, description="The fleet's name at that service, the same for all of it.")
    ] = "midstream"
    lease_s: Annotated[
        int,
        Meta(
            ge=3, le=60, description="A node that is not renewed for so long is lost; it is renewed three times in it."
        ),
    ] = 10
    when_alone: Annotated[
        Literal["serve", "stop"],
        Meta(description="What a node does whose lease may be over while that service is silent."),
    ] = "serve"
    etcd_endpoints: Annotated[
        str,
        Meta(
            pattern="^(https?://[^, ]+(,https?://[^, ]+){0,15})?$",
            title="URLs with commas between",
            description="Client URLs of etcd, each tried in turn.",
        ),
    ] = ""
    etcd_user: Annotated[str, Meta(description="User of etcd; empty where it has none.")] = ""
    etcd_password_file: Annotated[str, Meta(description="File with that user's password.")] = ""
    etcd_ca: Annotated[str, Meta(description="File with the authority of etcd's certificate, if no public one.")] = ""
    etcd_cert: Annotated[str, Meta(description="File with the certificate that etcd asks of its clients.")] = ""
    etcd_key: Annotated[str, Meta(description="File with the key of that certificate.")] = ""
    kubernetes_namespace: Annotated[str, Meta(description="Where Lease objects are; empty: the pod's own.")] = ""
    kubeconfig: Annotated[
        str, Meta(description="File that says how the Kubernetes API is reached; empty: the pod's service account.")
    ] = ""
    kubernetes_context: Annotated[str, Meta(description="Context of that file; empty: its current one.")] = ""
    listen: Annotated[
        str,
        Meta(
            pattern="^([^ ]+:[1-9][0-9]{0,4})?$",
            title="HOST:PORT, or nothing",
            description="Where the fleet alone reaches this one, by TLS; beside listen.host, which is for clients.",
        ),
    ] = ""
    tls_cert: Annotated[str, Meta(description="File with the certificate that this one shows the fleet.")] = ""
    tls_key: Annotated[str, Meta(description="File with the key of that certificate.")] = ""
    tls_ca: Annotated[
        str,
        Meta(description="File with the authority of the fleet's certificates; who shows one is believed."),
    ] = ""


class Replicas(_Part, frozen=True):
    """Snapshots in stores that are not this node's, and others' in its memory (docs/fleet.md)."""

    to: Annotated[
        str,
        Meta(
            pattern="^[^ ]*$",
            title="one or two URLs with a comma between",
            description="Where this node's snapshots go: peer://HOST:PORT, mooncake://HOST:PORT, s3://BUCKET/PREFIX.",
        ),
    ] = ""
    bandwidth: Annotated[
        int, Meta(ge=1 << 10, le=1 << 44, description="Bytes a second that sending them may take of the network.")
    ] = 125_000_000
    bytes_max: Annotated[
        int, Meta(ge=1 << 20, le=1 << 50, description="Space for them in each of mooncake and s3.")
    ] = 64 << 30
    memory_bytes: Annotated[
        int, Meta(ge=0, le=1 << 44, description="Host memory for other nodes' snapshots; 0 keeps none.")
    ] = 0
    listen: Annotated[
        str,
        Meta(
            pattern="^([^ ]+:[0-9]{1,5})?$",
            title="HOST:PORT, or nothing",
            description="Where other nodes bring theirs and take them; beyond loopback with certificates alone.",
        ),
    ] = ""
    tls_cert: Annotated[str, Meta(description="File with the certificate that this node shows others.")] = ""
    tls_key: Annotated[str, Meta(description="File with the key of that certificate.")] = ""
    tls_ca: Annotated[str, Meta(description="File with the authority of other nodes' certificates.")] = ""
    mooncake_python: Annotated[
        str, Meta(description="Interpreter that has Mooncake installed; empty: the one that runs this.")
    ] = ""


class Gateway(_Part, frozen=True):
    """How a gateway looks after its nodes (`midstream gateway`)."""

    nodes: Annotated[
        str,
        Meta(
            pattern="^[^ ]*$",
            title="[NAME=]URLs with commas between",
            description="Nodes to stand in front of, where fleet.coordination does not tell them.",
        ),
    ] = ""
    poll_s: Annotated[float, Meta(gt=0, le=60, description="How often each node is asked how it is.")] = 1.0
    lost_after_s: Annotated[
        float, Meta(gt=0, le=600, description="A node that answers nothing for so long is lost, with its sessions.")
    ] = 3.0


class Drain(_Part, frozen=True):
    """How a node is emptied (docs/fleet.md)."""

    moves_at_once: Annotated[
        int, Meta(ge=1, le=256, description="Sessions of one node, or worker, that are moved at the same time.")
    ] = 4
    short_s: Annotated[
        float, Meta(ge=0, le=3600, description="Sessions that end by themselves within that time are not moved.")
    ] = 2.0
    without_kv: Annotated[
        Literal["stay", "recompute"],
        Meta(description="What is done with sessions whose KV cannot be copied: left until the deadline, or moved."),
    ] = "stay"
    notices: Annotated[
        str,
        Meta(
            pattern="^[a-z,]*$",
            title="some of kubernetes,aws,gcp,azure with commas between",
            description="Whose word that this machine is to be left empties it, and takes no new sessions.",
        ),
    ] = ""
    notice_lead_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Notices for later than in so many seconds wait until then.")
    ] = 600.0
    kubernetes_node: Annotated[str, Meta(description="Name of the node object that is watched.")] = ""
    taints: Annotated[
        str,
        Meta(
            pattern="^[^ ]*$",
            title="keys with commas between",
            description="Taints of that node that are notices, as cordoning it always is.",
        ),
    ] = (
        "ToBeDeletedByClusterAutoscaler,karpenter.sh/disrupted,node.kubernetes.io/out-of-service,"
        "cloud.google.com/impending-node-termination"
    )
    conditions: Annotated[
        str,
        Meta(
            pattern="^[^ ]*$",
            title="TYPE or TYPE=STATUS, with commas between",
            description="Conditions of that node that are notices; without a status: True.",
        ),
    ] = ""


class Park(_Part, frozen=True):
    """How workers and other CUDA processes are parked (docs/parking.md)."""

    lock_s: Annotated[
        float,
        Meta(ge=0.1, le=600, description="Time for what a process has launched to end, before a park is given up."),
    ] = 10.0
    copy_s: Annotated[
        float,
        Meta(ge=1, le=3600, description="Time for its memory to leave the GPU, or to come back, before it is lost."),
    ] = 300.0


class Cards(_Part, frozen=True):
    """How the cards that workers run on are watched (docs/card.md)."""

    poll_s: Annotated[
        float, Meta(ge=0, le=3600, description="How often the state of each card is read; 0: cards are not watched.")
    ] = 5.0
    on_fault: Annotated[
        Literal["move", "tell"],
        Meta(description="What is done when a card is to be left: its sessions are moved, or it is only told."),
    ] = "move"


class Log(_Part, frozen=True):
    """What is written to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is written.")] = (
        "info"
    )
    format: Annotated[
        Literal["text", "json"], Meta(description="One line of text, or one JSON object, for each event.")
    ] = "text"


class Settings(_Part, frozen=True):
    """Everything that can be set."""

    state_dir: Annotated[
        str, Meta(min_length=1, description="Folder in memory for arenas and sockets; only its owner may enter.")
    ]
    workers: Annotated[
        tuple[WorkerUrl, ...],
        Meta(max_length=1024, description="Engines that others started: a list of name and url."),
    ] = ()
    listen: Listen = Listen()
    engine: Engine = Engine()
    arena: Arena = Arena()
    store: Store = Store()
    tier1: Tier1 = Tier1()
    proxy: Proxy = Proxy()
    restore: Restore = Restore()
    supervise: Supervise = Supervise()
    fleet: Fleet = Fleet()
    gateway: Gateway = Gateway()
    replicas: Replicas = Replicas()
    drain: Drain = Drain()
    park: Park = Park()
    cards: Cards = Cards()
    log: Log = Log()

    def replace(self, **changes: object) -> "Settings":
        """A copy with some parts replaced."""
        return msgspec.structs.replace(self, **changes)


def default_state_dir() -> str:
    """A folder in memory that is this user's own."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return str(Path(runtime) / "midstream")
    return f"/dev/shm/midstream-{os.getuid()}"


def default_settings() -> Settings:
    """What holds when nothing is set."""
    return Settings(state_dir=default_state_dir())


def leaves() -> dict[str, object]:
    """Each setting's dotted name and its annotated type, in the order of the classes above."""
    found: dict[str, object] = {}
    for name, kind in get_type_hints(Settings, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, _Part):
            for inner, leaf in get_type_hints(kind, include_extras=True).items():
                found[f"{name}.{inner}"] = leaf
        else:
            found[name] = kind
    return found


def description(kind: object) -> str:
    """What a setting is for."""
    return next((m.description for m in _metas(kind) if m.description), "")


def expected(kind: object) -> str:
    """The values that a setting may have, in words: `int in 1..64`, `float > 0 and <= 3600`, `"text" or "json"`."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if titles := [m.title for m in _metas(kind) if m.title]:
        return titles[0]  # said in words, where a pattern would be hard to read
    if get_origin(base) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(base))
    if base == tuple[WorkerUrl, ...]:
        return "a list of {name, url}"
    name = {str: "text", str | None: "text or null", bool: "true or false", int: "int", float: "float"}[base]  # type: ignore[index]
    bounds = [b for m in _metas(kind) for b in _bounds(m)]
    if base is int and len(bounds) == 2:
        low, high = (b.split()[1] for b in bounds)
        return f"int in {low}..{high}"
    return f"{name} {' and '.join(bounds)}".strip()


def check_workers(workers: tuple[WorkerUrl, ...]) -> None:
    """ValueError when a name or URL cannot be used, or a name stands for two workers."""
    seen: set[str] = set()
    for worker in workers:
        worker_name(worker.name)
        if worker.name in seen:
            raise ValueError(f"worker {worker.name!r} is named twice; give each its own name")
        seen.add(worker.name)
        try:
            parts = urlsplit(worker.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ValueError(f"worker {worker.name!r}: expected a URL like http://host:8000, got {worker.url!r}")


def parse_worker(text: str, index: int) -> WorkerUrl:
    """A worker from `[NAME=]URL`; one without a name is called `worker-<index>`."""
    name, separator, url = text.partition("=")
    if not separator or "://" in name:
        name, url = f"worker-{index}", text
    worker = WorkerUrl(name=name, url=url.rstrip("/"))
    check_workers((worker,))
    return worker


def require_workers(settings: Settings) -> None:
    """ConfigError when there is no worker to serve."""
    if not settings.workers:
        raise ConfigError(
            "no worker is named; add --worker URL, MIDSTREAM_WORKERS or `workers:` in the configuration file, "
            "or let midstream start the engine: midstream run -- vllm serve MODEL"
        )


def _metas(kind: object) -> list[Meta]:
    return [m for m in get_args(kind)[1:] if isinstance(m, Meta)] if get_origin(kind) is Annotated else []


def _bounds(meta: Meta) -> list[str]:
    pairs = (("> ", meta.gt), (">= ", meta.ge), ("< ", meta.lt), ("<= ", meta.le))
    return [f"{sign}{value}" for sign, value in pairs if value is not None]
