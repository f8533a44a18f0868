"""Measures the proxy against the same scripted worker without it, in one run: `python -m
midstream.loadtest.proxy_bench`.

Owns the processes (worker, proxy on a core of its own, clients here) and the figures: delay added to a token, tokens a
second through one core, memory of many open streams. Invariant: direct and proxied runs alternate, so that what else
the machine does hits both. It starts the proxy as a command and imports nothing of it.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop

from . import proxy_bench_client
from .proxy_bench_client import Load, Measured

ADDED_MS_MAX = 0.15
RATE_MIN = 20_000
RSS_MIB_MAX = 300


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of one run; the whole takes under two minutes."""

    rounds: int
    delay: Load
    flood: Load
    paced: Load
    open_streams: Load


def usual_plan(rounds: int) -> Plan:
    """The loads for which the bars hold."""
    return Plan(
        rounds=rounds,
        delay=Load(streams=16, tokens=250, gap_s=0.02),
        flood=Load(streams=64, tokens=2_000, gap_s=0),
        paced=Load(streams=200, tokens=500, gap_s=0.01),
        open_streams=Load(streams=2_000, tokens=10, gap_s=1),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out, and whether it is within the bars."""

    direct_p50_ms: float
    direct_p99_ms: float
    proxy_p50_ms: float
    proxy_p99_ms: float
    added_p50_ms: float
    direct_flood_per_s: float
    proxy_flood_per_s: float
    paced_per_s: float
    paced_p50_ms: float
    paced_cpu: float
    paced_cpu_us_per_token: float
    idle_rss_mib: float
    open_rss_mib: float
    open_streams: int

    @property
    def missed(self) -> list[str]:
        """The bars that were not reached."""
        bars = {
            f"added delay at p50 at most {ADDED_MS_MAX} ms": self.added_p50_ms <= ADDED_MS_MAX,
            f"at least {RATE_MIN} tokens/s through one core": self.proxy_flood_per_s >= RATE_MIN,
            f"{self.open_streams} open streams within {RSS_MIB_MAX} MiB": self.open_rss_mib <= RSS_MIB_MAX,
        }
        return [text for text, reached in bars.items() if not reached]


@contextmanager
def process_of(module: str, *arguments: str, core: int | None = None) -> Iterator[tuple[psutil.Process, str]]:
    """A Python process that prints its URL first; pinned to one core if asked."""
    child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        if core is not None:
            os.sched_setaffinity(child.pid, {core})
        url = (child.stdout.readline() if child.stdout else "").strip()
        if not url:
            raise RuntimeError(f"{module} did not start: see its output above")
        yield psutil.Process(child.pid), url
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keep this process, and the children that it starts, on some cores for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _watch_rss(process: psutil.Process, peak: list[float]) -> None:
    while True:
        peak[0] = max(peak[0], process.memory_info().rss / 2**20)
        await asyncio.sleep(0.2)


async def open_rss(process: psutil.Process, url: str, load: Load) -> float:
    peak = [0.0]
    watcher = asyncio.create_task(_watch_rss(process, peak))
    try:
        await proxy_bench_client.run(url, load, stamps=False)
    finally:
        watcher.cancel()
    return peak[0]


def usual_round(direct: list[Measured], proxied: list[Measured]) -> tuple[Measured, Measured]:
    """Of the pairs of neighbouring runs the one with the median difference."""
    pairs = sorted(zip(direct, proxied, strict=True), key=lambda pair: pair[1].delay_ms(0.5) - pair[0].delay_ms(0.5))
    return pairs[(len(pairs) - 1) // 2]


async def measure(plan: Plan, reattach_s: float = 0.0, *, fenced: bool = False) -> Figures:
    """Run the plan, on a proxy that keeps streams so long, or asks before each write as nodes of a fleet do.

    Needs two cores: the proxy gets the last one for itself.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the benchmark needs two cores: one for the proxy, one for worker and clients")
    run = proxy_bench_client.run
    with (
        on_cores(set(cores[:-1])),
        process_of("midstream.loadtest.proxy_bench_engine") as (_, direct),
        process_of(
            "midstream.proxy.standalone",
            *("--worker", direct, "--reattach-s", str(reattach_s)),
            *(["--fenced"] if fenced else []),
            core=cores[-1],
        ) as (proxy, url),
    ):
        idle = proxy.memory_info().rss / 2**20
        for target in (direct, url):
            await run(target, Load(4, 50, 0.005), stamps=True)
        delays: dict[str, list[Measured]] = {direct: [], url: []}
        floods: dict[str, list[Measured]] = {direct: [], url: []}
        for _ in range(plan.rounds):
            for target in (direct, url):
                delays[target].append(await run(target, plan.delay, stamps=True))
        for _ in range(plan.rounds):
            for target in (direct, url):
                floods[target].append(await run(target, plan.flood, stamps=False))
        before = proxy.cpu_times()
        paced = await run(url, plan.paced, stamps=True)
        after = proxy.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        open_mib = await open_rss(proxy, url, plan.open_streams)
    alone, through = usual_round(delays[direct], delays[url])
    return Figures(
        direct_p50_ms=alone.delay_ms(0.5),
        direct_p99_ms=alone.delay_ms(0.99),
        proxy_p50_ms=through.delay_ms(0.5),
        proxy_p99_ms=through.delay_ms(0.99),
        added_p50_ms=through.delay_ms(0.5) - alone.delay_ms(0.5),
        direct_flood_per_s=max(run.rate for run in floods[direct]),
        proxy_flood_per_s=max(run.rate for run in floods[url]),
        paced_per_s=paced.rate,
        paced_p50_ms=paced.delay_ms(0.5),
        paced_cpu=cpu_s / paced.seconds,
        paced_cpu_us_per_token=cpu_s / paced.tokens * 1e6,
        idle_rss_mib=idle,
        open_rss_mib=open_mib,
        open_streams=plan.open_streams.streams,
    )


def machine() -> dict[str, str]:
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = next(
            (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), cpu
        )
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("aiohttp", "uvloop", "msgspec")},
    }


def _table(figures: Figures, plan: Plan) -> str:
    rows = [
        ("delay engine to client, p50 / p99, direct", f"{figures.direct_p50_ms:.3f} / {figures.direct_p99_ms:.3f} ms"),
        ("the same through the proxy", f"{figures.proxy_p50_ms:.3f} / {figures.proxy_p99_ms:.3f} ms"),
        ("added to a token at p50", f"{figures.added_p50_ms:.3f} ms (bar: {ADDED_MS_MAX})"),
        ("tokens/s as fast as they go, direct", f"{figures.direct_flood_per_s:,.0f}"),
        ("the same through the proxy on one core", f"{figures.proxy_flood_per_s:,.0f} (bar: {RATE_MIN:,})"),
        (
            f"{plan.paced.streams} streams at {1 / plan.paced.gap_s:.0f} tokens/s each",
            f"{figures.paced_per_s:,.0f} tokens/s, {figures.paced_cpu:.0%} of the core "
            f"({figures.paced_cpu_us_per_token:.0f} us a token), p50 {figures.paced_p50_ms:.1f} ms",
        ),
        ("memory of the proxy, idle", f"{figures.idle_rss_mib:.0f} MiB"),
        (f"with {figures.open_streams:,} open streams", f"{figures.open_rss_mib:.0f} MiB (bar: {RSS_MIB_MAX})"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main() -> None:
    """Measure, print, and fail if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 11), metavar="1-10")
    parser.add_argument("--reattach-s", type=float, default=0.0, help="have the proxy keep streams for their clients")
    parser.add_argument("--fenced", action="store_true", help="have the proxy ask before each write")
    arguments = parser.parse_args()
    plan = usual_plan(arguments.rounds)
    figures = uvloop.run(measure(plan, arguments.reattach_s, fenced=arguments.fenced))
    if arguments.json:
        print(json.dumps({"machine": machine(), **asdict(figures), "missed": figures.missed}))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(_table(figures, plan))
        for text in figures.missed:
            print(f"missed: {text}")
    sys.exit(1 if figures.missed else 0)


if __name__ == "__main__":
    main()
