"""Measures the gateway in front of scripted nodes: `python -m midstream.loadtest.gateway_bench`.

Owns the processes (nodes, the gateway on a core of its own, clients here) and the figures: delay that the gateway adds
to a token, memory of many open streams, and what it costs to look after many nodes while nothing else goes on. It
starts the gateway as users do, and imports nothing of it.
"""

import argparse
import asyncio
import json
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from . import proxy_bench_client
from .proxy_bench import machine, on_cores, open_rss, process_of, usual_round
from .proxy_bench_client import Load, Measured

ADDED_MS_MAX = 0.2
RSS_MIB_MAX = 1536
# The bar for memory is one for so many streams; with fewer, for want of descriptors, it is what so many would take.
STREAMS = 10_000
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of one run."""

    rounds: int
    nodes: int
    delay: Load
    open_streams: Load
    many_nodes: int
    idle_s: float


def usual_plan(rounds: int) -> Plan:
    """The loads for which the bars hold."""
    return Plan(
        rounds=rounds,
        nodes=4,
        delay=Load(streams=16, tokens=250, gap_s=0.02),
        open_streams=Load(
            streams=min(STREAMS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 500), tokens=5, gap_s=8
        ),
        many_nodes=500,
        idle_s=10,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out, and whether it is within the bars."""

    direct_p50_ms: float
    gateway_p50_ms: float
    gateway_p99_ms: float
    added_p50_ms: float
    idle_rss_mib: float
    open_rss_mib: float
    open_streams: int
    many_nodes: int
    many_ready_s: float
    many_idle_cpu: float
    many_rss_mib: float

    @property
    def full_rss_mib(self) -> float:
        """What as many streams as the bar is for take."""
        return self.idle_rss_mib + (self.open_rss_mib - self.idle_rss_mib) * max(1.0, STREAMS / self.open_streams)

    @property
    def missed(self) -> list[str]:
        """The bars that were not reached."""
        bars = {
            f"added delay at p50 at most {ADDED_MS_MAX} ms": self.added_p50_ms <= ADDED_MS_MAX,
            f"{STREAMS:,} open streams within {RSS_MIB_MAX} MiB": self.full_rss_mib <= RSS_MIB_MAX,
        }
        return [text for text, reached in bars.items() if not reached]


@contextmanager
def _gateway(nodes: list[str], core: int) -> Iterator[tuple[psutil.Process, str, float]]:
    """A gateway that has all of these nodes; its process, URL, and how long it took to have them."""
    with tempfile.TemporaryDirectory() as folder:
        secret, log = Path(folder) / "secret", Path(folder) / "log"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        named = ",".join(f"node-{index}={url}" for index, url in enumerate(nodes))
        environ = {**os.environ, "MIDSTREAM_GATEWAY_NODES": named}
        argv = [
            sys.executable, "-m", "midstream.sidecar.cli", "gateway", "--port", "0", "--secret-file", str(secret)
        ]  # fmt: skip
        with log.open("wb") as sink:
            child = subprocess.Popen(argv, stdout=sink, stderr=sink, env=environ, cwd="/")
        try:
            os.sched_setaffinity(child.pid, {core})
            began_s = listening_s = time.monotonic()
            url = ""
            while log.read_text().count("readiness=ready") < len(nodes):
                if child.poll() is not None or time.monotonic() > began_s + _START_S:
                    raise RuntimeError(f"the gateway has not found its nodes:\n{log.read_text()[-2000:]}")
                if not url and "event=listening url=" in log.read_text():
                    url, listening_s = _url_in(log), time.monotonic()
                time.sleep(0.02)
            yield psutil.Process(child.pid), _url_in(log), time.monotonic() - listening_s
        finally:
            child.kill()
            child.wait()


def _url_in(log: Path) -> str:
    return log.read_text().split("event=listening url=")[1].split()[0]


async def measure(plan: Plan) -> Figures:
    """Run the plan. Needs two cores: the gateway gets the last one for itself."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the benchmark needs two cores: one for the gateway, one for nodes and clients")
    run = proxy_bench_client.run
    most = max(plan.nodes, plan.many_nodes)
    with (
        on_cores(set(cores[:-1])),
        process_of("midstream.loadtest.proxy_bench_engine", "--nodes", str(most)) as (_, told),
    ):
        urls = told.split(",")
        with _gateway(urls[: plan.nodes], cores[-1]) as (gateway, url, _):
            idle_rss = gateway.memory_info().rss / 2**20
            delays: dict[str, list[Measured]] = {urls[0]: [], url: []}
            for target in delays:
                await run(target, Load(4, 50, 0.005), stamps=True)
            for _ in range(plan.rounds):
                for target in delays:
                    delays[target].append(await run(target, plan.delay, stamps=True))
            open_mib = await open_rss(gateway, url, plan.open_streams)
        with _gateway(urls[: plan.many_nodes], cores[-1]) as (gateway, _, ready_s):
            await asyncio.sleep(1)
            before = gateway.cpu_times()
            await asyncio.sleep(plan.idle_s)
            after = gateway.cpu_times()
            many_rss = gateway.memory_info().rss / 2**20
    alone, through = usual_round(delays[urls[0]], delays[url])
    return Figures(
        direct_p50_ms=alone.delay_ms(0.5),
        gateway_p50_ms=through.delay_ms(0.5),
        gateway_p99_ms=through.delay_ms(0.99),
        added_p50_ms=through.delay_ms(0.5) - alone.delay_ms(0.5),
        idle_rss_mib=idle_rss,
        open_rss_mib=open_mib,
        open_streams=plan.open_streams.streams,
        many_nodes=plan.many_nodes,
        many_ready_s=ready_s,
        many_idle_cpu=((after.user - before.user) + (after.system - before.system)) / plan.idle_s,
        many_rss_mib=many_rss,
    )


def _table(figures: Figures) -> str:
    rows = [
        ("delay node to client, p50, direct", f"{figures.direct_p50_ms:.3f} ms"),
        ("the same through the gateway, p50 / p99", f"{figures.gateway_p50_ms:.3f} / {figures.gateway_p99_ms:.3f} ms"),
        ("added to a token at p50", f"{figures.added_p50_ms:.3f} ms (bar: {ADDED_MS_MAX})"),
        ("memory of the gateway, idle", f"{figures.idle_rss_mib:.0f} MiB"),
        (
            f"with {figures.open_streams:,} open streams",
            f"{figures.open_rss_mib:.0f} MiB; {STREAMS:,}: {figures.full_rss_mib:.0f} MiB (bar: {RSS_MIB_MAX:,})",
        ),
        (
            f"{figures.many_nodes} nodes and no session",
            f"{figures.many_idle_cpu:.1%} of a core, {figures.many_rss_mib:.0f} MiB; all ready "
            f"{figures.many_ready_s:.1f} s after it listened",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main() -> None:
    """Measure, print, and fail if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 11), metavar="1-10")
    arguments = parser.parse_args()
    figures = uvloop.run(measure(usual_plan(arguments.rounds)))
    if arguments.json:
        print(json.dumps({"machine": machine(), **asdict(figures), "missed": figures.missed}))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(_table(figures))
        for text in figures.missed:
            print(f"missed: {text}")
    sys.exit(1 if figures.missed else 0)


if __name__ == "__main__":
    main()
