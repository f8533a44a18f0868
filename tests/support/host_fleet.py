"""A fleet on hosts of its own: an etcd, nodes with the embedded engine, a gateway, and clients that compare each token.

Owns what it starts and where that lies. All is started as users start it, each on a host (`hosts.py`) with the same
port; the clients' host is the switch. What befalls a host is that host's (`Host`); here is who is where.
"""

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import trustme

from midstream.loadtest.client import Answer, read_stream
from support import mooncakes
from support.etcd_server import binary as etcd_binary
from support.host_wire import Link
from support.hosts import ADDRESSES, Host, Hosts
from support.sidecars import COMPLETIONS, MODEL, REPORT, outcome_of

PORT = 8800
PEER_PORT = 8900
ETCD_PORT = 2379
MOONCAKE_PORT = 50051
# Engines of many beside these: they are no test of how fast any starts.
START_S = 240.0
LEASE_S = 3
POLL_S = 0.02
_CERTIFIED = 12

Words = Mapping[str, object]

# Reads a stream on a host and writes the time of each event with tokens, of the clock that clients of this file use.
_WITNESS = """
import http.client, json, sys, time
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connection = http.client.HTTPConnection(host, port, timeout=300)
connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
for line in connection.getresponse():
    if line.startswith(b"data: {") and b"token_ids" in line:
        print(f"{time.perf_counter():.4f}", flush=True)
"""


@dataclass(slots=True)
class Node:
    """One node of the fleet; `process` is its sidecar's, once it was started."""

    name: str
    host: Host
    folder: Path
    settings: Words
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{PORT}"

    @property
    def log(self) -> Path:
        return self.folder / "log"


@dataclass(slots=True)
class Files:
    """What all of a fleet have: a secret, and a certificate that is good for every host."""

    folder: Path
    secret: Path = field(init=False)

    def __post_init__(self) -> None:
        self.secret = self.folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        authority = trustme.CA()
        issued = authority.issue_cert(*(f"{ADDRESSES}{n}" for n in range(2, 2 + _CERTIFIED)))
        authority.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        issued.private_key_pem.write_to_path(str(self.folder / "key.pem"))
        issued.cert_chain_pems[0].write_to_path(str(self.folder / "cert.pem"))

    @property
    def of_replicas(self) -> dict[str, object]:
        return {f"replicas.tls_{what}": str(self.folder / f"{what}.pem") for what in ("ca", "key", "cert")}


class HostFleet:
    """One fleet. `of_each(index, addresses, others)` are more settings of a node; `links` those of nodes' hosts.

    `others` are further hosts, by name, and their links.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        nodes: int = 2,
        settings: Words | None = None,
        of_each: "Callable[[int, Sequence[str], Mapping[str, str]], Words]" = lambda index, addresses, others: {},
        gateway_settings: Words | None = None,
        links: Mapping[int, Link] | None = None,
        others: Mapping[str, Link | None] | None = None,
        lease_s: int = LEASE_S,
    ) -> None:
        self.folder = folder
        self.lease_s = lease_s
        self._command = list(command)
        self.files = Files(folder)
        self.hosts = Hosts()
        self.etcd_host = self.hosts.add()
        self.gateway_host = self.hosts.add()
        self._gateway_settings = gateway_settings or {}
        of_nodes = [self.hosts.add((links or {}).get(n)) for n in range(nodes)]
        addresses = [host.address for host in of_nodes]
        self.others = {name: self.hosts.add(link) for name, link in (others or {}).items()}
        self.nodes: dict[str, Node] = {}
        for index, host in enumerate(of_nodes):
            name = f"node-{index}"
            place = folder / name
            place.mkdir()
            more = {
                **(settings or {}),
                **of_each(index, addresses, {name: other.address for name, other in self.others.items()}),
            }
            self.nodes[name] = Node(
                name, host, place, {"fleet.name": name, **self._shared(), **self.files.of_replicas, **more}
            )

    def _shared(self) -> dict[str, object]:
        return {
            "fleet.secret_file": str(self.files.secret),
            "fleet.coordination": "etcd",
            "fleet.etcd_endpoints": f"http://{self.etcd_host.address}:{ETCD_PORT}",
            "fleet.lease_s": self.lease_s,
        }

    # ---- starting

    async def start(self) -> None:
        """All of it; returns when the gateway has all nodes."""
        self.start_etcd()
        for node in self.nodes.values():
            self.start_node(node)
        self.start_gateway()
        async with self.http() as http:
            await self.until_nodes(http, len(self.nodes), limit_s=START_S)

    def start_etcd(self) -> None:
        """The service; again with the data that it had."""
        address, binary = self.etcd_host.address, etcd_binary()
        assert binary is not None
        own, peers = f"http://{address}:{ETCD_PORT}", f"http://{address}:{ETCD_PORT + 1}"
        self.etcd = self.etcd_host.start(
            [
                str(binary), "--name", "alone", "--data-dir", str(self.folder / "etcd"),
                "--listen-client-urls", own, "--advertise-client-urls", own, "--listen-peer-urls", peers,
                "--initial-advertise-peer-urls", peers, "--initial-cluster", f"alone={peers}",
            ],
            log=self.folder / "etcd.log",
        )  # fmt: skip

    def start_node(self, node: Node, *, command: Sequence[str] | None = None) -> None:
        """A node, with one worker."""
        argv = [
            *self._cli("run"), "--workers", "1", "--host", node.host.address, "--port", str(PORT),
            "--state-dir", str(node.folder / "state"), "--store-dir", str(node.folder / "store"),
            *_sets(node.settings), "--", *(command or self._command),
        ]  # fmt: skip
        node.process = node.host.start(argv, log=node.log)

    def start_gateway(self) -> None:
        """The gateway, which hears of its nodes from the service."""
        argv = [
            *self._cli("gateway"), "--host", self.gateway_host.address, "--port", str(PORT),
            *_sets({**self._shared(), **self._gateway_settings}),
        ]  # fmt: skip
        self.gateway = self.gateway_host.start(argv, log=self.folder / "gateway.log")

    def start_mooncake(self, name: str, lent_bytes: int) -> None:
        """A master and somebody who lends memory, on one of the others."""
        python, host = mooncakes.python(), self.others[name]
        assert python is not None
        log = self.folder / f"{name}.log"
        master = [
            str(python.with_name("mooncake_master")), "-port", str(MOONCAKE_PORT), "-rpc_address", host.address,
            "-metrics_host", host.address, "-metrics_port", str(MOONCAKE_PORT + 1),
        ]  # fmt: skip
        host.start(master, log=log)
        deadline_s = time.monotonic() + START_S
        while not self.hosts.listens(host, MOONCAKE_PORT):
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(POLL_S)
        master_url = f"{host.address}:{MOONCAKE_PORT}"
        host.start([str(python), "-I", "-c", mooncakes.LENDER, master_url, str(lent_bytes), host.address], log=log)

    def _cli(self, word: str) -> list[str]:
        return [sys.executable, "-m", "midstream.sidecar.cli", word]

    # ---- asking

    @property
    def url(self) -> str:
        return f"http://{self.gateway_host.address}:{PORT}"

    def http(self) -> aiohttp.ClientSession:
        """A client at the switch."""
        return aiohttp.ClientSession(connector=self.hosts.connector(), timeout=aiohttp.ClientTimeout(120))

    async def told(self, http: aiohttp.ClientSession, path: str, *, url: str = "") -> dict[str, Any]:
        """A JSON answer of the gateway's (or a node's) own API; {} when there is none within two seconds."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with http.get((url or self.url) + path, timeout=aiohttp.ClientTimeout(2)) as answer:
                found = await answer.json()
                return found if isinstance(found, dict) else {}
        return {}

    async def ready(self, http: aiohttp.ClientSession) -> set[str]:
        """Names of the nodes that are ready for the gateway."""
        nodes = (await self.told(http, "/midstream/v1/status")).get("nodes", [])
        return {_name(node["name"]) for node in nodes if node["readiness"] == "ready"}

    async def until_nodes(self, http: aiohttp.ClientSession, count: int, *, limit_s: float) -> float:
        """Wait until exactly so many are ready; returns how long that took."""
        began_s = time.monotonic()
        while len(await self.ready(http)) != count:
            assert time.monotonic() < began_s + limit_s, self.last_lines()
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s

    async def sessions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The gateway's sessions with the names of their nodes, newest last."""
        told = (await self.told(http, "/midstream/v1/sessions")).get("sessions", [])
        return [{**session, "name": _name(session["node"])} for session in told]

    async def by_node(self, http: aiohttp.ClientSession) -> dict[str, int]:
        """How many sessions run at each node."""
        found: dict[str, int] = {}
        for session in await self.sessions(http):
            if session["state"] == "running":
                found[session["name"]] = found.get(session["name"], 0) + 1
        return found

    def witness(self, node: Node, body: Mapping[str, Any]) -> "Callable[[], list[float]]":
        """A client of a node on that node's own host, which sees what it sends when nobody else can.

        What is returned gives the times at which tokens have come so far.
        """
        log = self.folder / f"witness-{node.name}"
        asked = json.dumps({"model": MODEL, "stream": True, "return_token_ids": True, **body})
        node.host.start([sys.executable, "-c", _WITNESS, node.host.address, str(PORT), asked], log=log)
        return lambda: [float(word) for word in log.read_text().split()]

    async def busiest(self) -> str:
        """The node that has most sessions."""
        async with self.http() as http:
            at = await self.by_node(http)
        return max(at, key=lambda name: at[name])

    def said_at(self, words: str) -> float:
        """When the gateway has logged these words first, by the clock of clients (`time.perf_counter`)."""
        lines = (self.folder / "gateway.log").read_text(errors="replace").splitlines()
        first = next(line for line in lines if words in line)
        at_s = datetime.strptime(first[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        return at_s - time.time() + time.perf_counter()

    def last_lines(self) -> str:
        """The ends of all logs."""
        logs = [self.folder / "gateway.log", *(node.log for node in self.nodes.values())]
        return "\n".join(
            f"{log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs if log.exists()
        )

    def close(self) -> None:
        """End all of it."""
        self.hosts.close()


@contextmanager
def host_fleets(command: Sequence[str]) -> Iterator[Callable[..., HostFleet]]:
    """A way to make fleets, all of which are ended."""
    # Short, for the sake of sockets' names, and in memory.
    with tempfile.TemporaryDirectory(prefix="msf-", dir="/dev/shm", ignore_cleanup_errors=True) as root:
        made: list[HostFleet] = []

        def make(**options: Any) -> HostFleet:
            place = Path(root) / str(len(made))
            place.mkdir()
            made.append(HostFleet(place, command, **options))
            return made[-1]

        try:
            yield make
        finally:
            for fleet in made:
                fleet.close()
                shutil.rmtree(fleet.folder, ignore_errors=True)


# ---- clients


@dataclass(slots=True)
class Clients:
    """Streaming clients, all at once, whose answers are compared with what they are when nothing happens."""

    fleet: HostFleet
    bodies: Sequence[dict[str, Any]]
    wanted: list[Answer] = field(default_factory=list)

    async def undisturbed(self, http: aiohttp.ClientSession) -> None:
        """What each answer is to be."""
        self.wanted = list(await asyncio.gather(*(self._ask(http, body) for body in self.bodies)))
        for answer in self.wanted:
            assert answer.whole, (answer.error, answer.violations, self.fleet.last_lines())

    async def disturbed(
        self,
        http: aiohttp.ClientSession,
        disturb: Callable[[], Awaitable[None]],
        *,
        cut: int,
        headers: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """The answers, with something done as soon as each has `cut` tokens and none is over."""
        counts = [0] * len(self.bodies)
        doing: list[asyncio.Task[None]] = []

        def heard(index: int) -> Callable[[Answer], None]:
            def on_tokens(answer: Answer) -> None:
                counts[index] = len(answer.token_ids)
                if not doing and min(counts) >= cut:
                    doing.append(asyncio.create_task(_done(disturb)))

            return on_tokens

        answers = await asyncio.gather(
            *(self._ask(http, body, heard(index), headers) for index, body in enumerate(self.bodies))
        )
        assert doing, f"nothing was done: {counts}"
        await doing[0]
        return answers

    def require_same(self, answers: Sequence[Answer]) -> None:
        """Nothing lost, nothing repeated, nothing else: token by token."""
        for index, (answer, wanted) in enumerate(zip(answers, self.wanted, strict=True)):
            assert answer.whole, (index, answer.error, answer.violations, answer.report, self.fleet.last_lines())
            pairs = zip(answer.token_ids, wanted.token_ids, strict=False)
            differs = next((n for n, (got, other) in enumerate(pairs) if got != other), None)
            assert differs is None, f"stream {index} differs at token {differs} of {len(wanted.token_ids)}"
            assert len(answer.token_ids) == len(wanted.token_ids), f"stream {index}: {len(answer.token_ids)} tokens"
            assert answer.same_as(wanted), f"stream {index} has the tokens, and another text, finish or usage"

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        body: dict[str, Any],
        on_tokens: Callable[[Answer], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        asked = {"model": MODEL, **body}
        told = {**REPORT, **(headers or {})}
        return await read_stream(http, self.fleet.url + COMPLETIONS, asked, headers=told, on_tokens=on_tokens)


async def _done(disturb: Callable[[], Awaitable[None]]) -> None:
    await disturb()


def _name(member: str) -> str:
    """What a node is called through all of its lives."""
    return member.partition(".")[0]


def _sets(settings: Words) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds: greedy, sampled, with a penalty."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7},
        {"temperature": 0, "frequency_penalty": 0.4},
    )
    text = "what one host knows another has to know"
    return [
        {"prompt": f"Stream {n}: {text}", "max_tokens": tokens, "ignore_eos": True, **kinds[n % len(kinds)]}
        for n in range(count)
    ]


def keeping(index: int, addresses: Sequence[str], others: Mapping[str, str]) -> dict[str, object]:
    """Settings of nodes that keep in memory what others bring."""
    return {"replicas.listen": f"{addresses[index]}:{PEER_PORT}", "replicas.memory_bytes": 256 << 20}


def with_replicas(index: int, addresses: Sequence[str], others: Mapping[str, str]) -> dict[str, object]:
    """Settings of nodes each of which brings what it has to the memory of the next one."""
    return {
        **keeping(index, addresses, others),
        "replicas.to": f"peer://{addresses[(index + 1) % len(addresses)]}:{PEER_PORT}",
        "store.snapshot_every_s": 0.05,
        "store.tail_every_tokens": 8,
    }


@dataclass(frozen=True, slots=True)
class Told:
    """What came of streams that were disturbed: how many outcomes of each kind, and what clients waited."""

    outcomes: Mapping[str, int]
    gaps_s: Sequence[float]

    @property
    def interrupted(self) -> int:
        return sum(self.outcomes.values())

    @property
    def p99_s(self) -> float:
        return percentile(self.gaps_s, 0.99)

    def __str__(self) -> str:
        """One line for docs/benchmarks.md."""
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        p50_s, most_s = percentile(self.gaps_s, 0.5), max(self.gaps_s)
        return f"{outcomes}; client gap p50 {p50_s:.2f}, p99 {self.p99_s:.2f}, max {most_s:.2f} s"


def told_of(answers: Sequence[Answer]) -> Told:
    """Of those among them that were interrupted; there has to be one."""
    interrupted = [answer for answer in answers if "outcome=undisturbed" not in answer.report]
    assert interrupted, "nobody was interrupted"
    came_to = [outcome_of(answer)[0] for answer in interrupted]
    return Told({o: came_to.count(o) for o in sorted(set(came_to))}, [answer.gap_s for answer in interrupted])


def percentile(values: Sequence[float], share: float) -> float:
    """Between the nearest ranks."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
