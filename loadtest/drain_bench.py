"""Measures planned moves: `python -m midstream.loadtest.drain_bench [--way nodes] -- ENGINE COMMAND`.

Starts sidecars as users do, has one worker (or one node, behind a gateway) write all of some streams, drains it, and
prints for how long each stream stood still, beside the time of a step. Owns the processes that it starts and the
figures; it ends with 1 where an answer is not whole, was not exact, or a pause is over its bar:

    p99 of pauses <= 2 steps + 150 ms + the transfer of the tail

The pause of a stream is the longest silence that its client saw while the drain went on. A run without a drain says
what such a silence is anyway, and which answers an engine repeats at all when its batches are others.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ..session.errors import EngineError
from ..session.ports import free_ports
from .client import Answer, read_stream
from .exactness import lost_and_duplicated
from .harness import SidecarProcess
from .percentiles import percentile

COMPLETIONS = "/v1/completions"
STEPS = 2
MORE_MS = 150.0
START_S = 900.0
DRAIN_S = 300.0
# Tokens that each stream has before the drain begins.
BEFORE = 24
_WORDS = ["river", "stone", "lamp", "winter", "garden", "paper", "wheel", "island", "morning", "copper"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a drain came to, of all streams."""

    way: str
    streams: int
    tokens: int
    whole: int
    lost: int
    repeated: int
    exact: int
    outcomes: dict[str, int]
    identical: int
    identical_without: int
    step_ms: float
    pauses_ms: list[float]
    pause_p50_ms: float
    pause_p99_ms: float
    silence_without_p99_ms: float
    transfer_p99_ms: float
    bar_ms: float
    drain_s: float
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, and nobody waited for too long."""
        good = self.whole == self.exact == self.streams and self.lost == self.repeated == 0
        return good and self.pause_p99_ms <= self.bar_ms


@dataclass(slots=True)
class Stand:
    """What is measured: where clients connect, what is drained, and what moves are told of in whose log."""

    url: str
    state_dir: Path
    worker: str | None
    log: Path

    async def control(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the sidecar that is drained, as its operator."""
        connector = aiohttp.UnixConnector(str(self.state_dir / "control.sock"))
        async with (
            aiohttp.ClientSession("http://sidecar", connector=connector) as http,
            http.request(method, path, json=body) as answer,
        ):
            told = await answer.json()
            if answer.status != 200:
                raise EngineError(f"{path}: {told}")
            return dict(told)


def body_of(index: int, model: str, tokens: int) -> dict[str, Any]:
    """Requests that differ, sampled and greedy ones, all of the same length."""
    prompt = " ".join(_WORDS[(index + i) % len(_WORDS)] for i in range(24 + index))
    return {
        "model": model, "prompt": f"{index}: {prompt}", "max_tokens": tokens, "ignore_eos": True,
        "temperature": 0.0 if index % 2 else 0.8, "seed": 1000 + index,
    }  # fmt: skip


async def streamed(
    http: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]], begun: "asyncio.Event | None" = None
) -> list[Answer]:
    """All of them at once; `begun` when each has so many tokens that it may be disturbed."""
    ready: set[int] = set()

    async def one(index: int) -> Answer:
        async def on_tokens(answer: Answer) -> None:
            if len(answer.token_ids) >= BEFORE and index not in ready:
                ready.add(index)
                if begun is not None and len(ready) == len(bodies):
                    begun.set()

        headers = {"X-Midstream-Report": "1"}
        return await read_stream(http, url + COMPLETIONS, bodies[index], headers=headers, on_tokens=on_tokens)

    return await asyncio.gather(*(one(index) for index in range(len(bodies))))


def gaps_ms(answer: Answer, since_s: float, until_s: float) -> list[float]:
    """Silences of a stream that began or ended in that time."""
    pairs = zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)
    return [(b - a) * 1000 for a, b in pairs if b >= since_s and a <= until_s]


async def measure(stand: Stand, way: str, model: str, streams: int, tokens: int, settle: Any) -> Moved:
    """Undisturbed answers first, then the same with a drain in the middle."""
    bodies = [body_of(index, model, tokens) for index in range(streams)]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        wanted = await streamed(http, stand.url, bodies)
        again = await streamed(http, stand.url, bodies)
        begun = asyncio.Event()
        running = asyncio.create_task(streamed(http, stand.url, bodies, begun))
        either = [running, asyncio.create_task(begun.wait())]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        either[1].cancel()
        await settle(http)
        await asyncio.sleep(1.0)
        since_s = time.perf_counter()
        await stand.control("POST", "/drain", {"deadline_s": DRAIN_S, "worker": stand.worker})
        until_s = await _drained(stand, running)
        answers = await running
    before = [gap for a in answers for gap in gaps_ms(a, 0.0, since_s)[BEFORE // 2 :]]
    silences = [max(gaps_ms(a, since_s, until_s), default=0.0) for a in answers]
    undisturbed = [max(gaps_ms(a, a.arrivals_s[len(a.arrivals_s) // 2], float("inf")), default=0.0) for a in again]
    outcomes: dict[str, int] = {}
    lost = repeated = 0
    for answer, other, control in zip(answers, wanted, again, strict=True):
        found = re.search(r"outcome=(\w+)", answer.report or "")
        outcomes[found[1] if found else "none"] = outcomes.get(found[1] if found else "none", 0) + 1
        if answer.same_as(other) or not control.same_as(other):
            # What the engine itself does not repeat says nothing of a token that would be lost.
            continue
        missing, twice = lost_and_duplicated(answer.token_ids, other.token_ids)
        lost, repeated = lost + missing, repeated + twice
    transfers = _transfers_ms(stand.log)
    step = percentile(before, 50)
    return Moved(
        way=way,
        streams=streams,
        tokens=tokens,
        whole=sum(a.whole and len(a.token_ids) == tokens for a in answers),
        lost=lost,
        repeated=repeated,
        exact=outcomes.get("exact", 0),
        outcomes=outcomes,
        identical=sum(a.same_as(b) for a, b in zip(answers, wanted, strict=True)),
        identical_without=sum(a.same_as(b) for a, b in zip(again, wanted, strict=True)),
        step_ms=round(step, 1),
        pauses_ms=sorted(round(gap, 1) for gap in silences),
        pause_p50_ms=round(percentile(silences, 50), 1),
        pause_p99_ms=round(percentile(silences, 99), 1),
        silence_without_p99_ms=round(percentile(undisturbed, 99), 1),
        transfer_p99_ms=round(percentile(transfers, 99), 1),
        bar_ms=round(STEPS * step + MORE_MS + percentile(transfers, 99), 1),
        drain_s=round(until_s - since_s, 2),
    )


async def _drained(stand: Stand, running: "asyncio.Task[list[Answer]]") -> float:
    """When nothing was left; a sidecar that has ended has nothing."""
    while not running.done():
        try:
            told = await stand.control("GET", "/drain", {})
        except aiohttp.ClientError:
            break
        part = told if stand.worker is None else told["workers"].get(stand.worker, {"phase": "over"})
        if part["phase"] == "over" or not part.get("sessions_left"):
            break
        await asyncio.sleep(0.05)
    return time.perf_counter()


def _transfers_ms(log: Path) -> list[float]:
    """How long tails took to be saved elsewhere, where they were (a gateway's log)."""
    return [float(found) for found in re.findall(r"event=cut .*save_ms=([\d.]+)", log.read_text(errors="replace"))]


# ---- what is started


@asynccontextmanager
async def workers(
    command: Sequence[str], environ: dict[str, str], http: aiohttp.ClientSession
) -> AsyncIterator[tuple[Stand, Any]]:
    """One sidecar with two workers; all streams are brought to the first one before it is drained."""
    sidecar = SidecarProcess(command, workers=2, environ=environ, settings={"drain.short_s": 0})
    try:
        await sidecar.start(http, timeout_s=START_S)
        stand = Stand(sidecar.url, sidecar.state_dir, "worker-0", sidecar.log)

        async def settle(_: aiohttp.ClientSession) -> None:
            async with aiohttp.ClientSession() as asking:
                for session in await sidecar.sessions(asking):
                    if session["worker"] != "worker-0" and session["state"] == "running":
                        await stand.control("POST", f"/sessions/{session['session']}/move", {})
                async with asyncio.timeout(60):
                    while not _settled(await sidecar.sessions(asking), "worker-0"):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

        yield stand, settle
    finally:
        await asyncio.to_thread(sidecar.stop)


def _settled(sessions: Sequence[dict[str, Any]], worker: str) -> bool:
    """Whether all that run go on at that worker."""
    running = [s for s in sessions if s["state"] in ("running", "restoring", "interrupted")]
    return all(s["worker"] == worker and s["state"] == "running" for s in running)


@asynccontextmanager
async def nodes(
    command: Sequence[str], environ: dict[str, str], http: aiohttp.ClientSession
) -> AsyncIterator[tuple[Stand, Any]]:
    """A gateway before two nodes, of which the second one stands still until all streams have begun at the first."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-drain-")))
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        both = []
        for name, port in zip(("a", "b"), free_ports(2), strict=True):
            settings = {
                "fleet.secret_file": secret, "fleet.name": name, "replicas.listen": f"127.0.0.1:{port}",
                "replicas.memory_bytes": 2 << 30, "store.snapshot_every_s": 1.0, "proxy.stall_floor_s": 60,
            }  # fmt: skip
            node = SidecarProcess(
                command, workers=1, environ=environ, settings=settings, store=folder / f"store-{name}"
            )
            stack.push_async_callback(asyncio.to_thread, node.stop)
            both.append(node)
        for node in both:
            # One after the other: each start keeps all of a small machine busy.
            await node.start(http, timeout_s=START_S)
        first, second = both
        assert second.process is not None
        frozen = second.process.pid
        os.kill(frozen, signal.SIGSTOP)
        stack.callback(_thaw, frozen)
        log, url, gateway = await _gateway(folder, secret, {"a": first.url, "b": second.url}, environ)
        stack.callback(_end, gateway)
        await _until_state(http, url, "a", "ready")

        async def settle(asking: aiohttp.ClientSession) -> None:
            _thaw(frozen)
            await _until_state(asking, url, "b", "ready")

        yield Stand(url, first.state_dir, None, log), settle


async def _gateway(
    folder: Path, secret: Path, urls: dict[str, str], environ: dict[str, str]
) -> "tuple[Path, str, subprocess.Popen[bytes]]":
    log = folder / "gateway.log"
    named = [word for name, url in urls.items() for word in ("--node", f"{name}={url}")]
    argv = [
        sys.executable,
        "-m",
        "midstream.sidecar.cli",
        "gateway",
        *named,
        "--port",
        "0",
        "--secret-file",
        str(secret),
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, env={**os.environ, **environ})  # noqa: ASYNC220
    async with asyncio.timeout(60):
        while not (found := re.search(r"event=listening url=(\S+)", log.read_text(errors="replace"))):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return log, found[1], process


async def _until_state(http: aiohttp.ClientSession, url: str, name: str, state: str) -> None:
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"{url}/midstream/v1/status") as answer:
                told = await answer.json()
            if any(node["name"] == name and node["readiness"] == state for node in told["nodes"]):
                return
            await asyncio.sleep(0.1)


def _thaw(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


WAYS = {"workers": workers, "nodes": nodes}


async def run(options: argparse.Namespace) -> Moved:
    """One measurement."""
    environ = dict(pair.split("=", 1) for pair in options.env)
    async with aiohttp.ClientSession() as http, WAYS[options.way](options.command, environ, http) as (stand, settle):
        return await measure(stand, options.way, options.model, options.streams, options.tokens, settle)


def show(moved: Moved) -> str:
    """What a person wants to know of it."""
    return (
        f"{moved.way}: {moved.streams} streams of {moved.tokens} tokens drained in {moved.drain_s:.1f} s; "
        f"whole {moved.whole}, exact {moved.exact}, lost {moved.lost}, repeated {moved.repeated}, "
        f"as undisturbed {moved.identical} (without a drain {moved.identical_without})\n"
        f"step {moved.step_ms:.1f} ms; pause p50 {moved.pause_p50_ms:.1f}, p99 {moved.pause_p99_ms:.1f} ms "
        f"(without a drain p99 {moved.silence_without_p99_ms:.1f}); "
        f"tail's transfer p99 {moved.transfer_p99_ms:.1f} ms; "
        f"bar {moved.bar_ms:.1f} ms: {'held' if moved.holds else 'MISSED'}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="midstream.loadtest.drain_bench", description="Pauses of planned moves.")
    parser.add_argument("--way", choices=sorted(WAYS), default="workers")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--model", default="tiny", help="as the engine serves it")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engines")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs="+", help="how one engine is started, after --")
    options = parser.parse_args(arguments)
    moved = asyncio.run(run(options))
    print(json.dumps(asdict(moved)) if options.json else show(moved))
    return 0 if moved.holds else 1


if __name__ == "__main__":
    sys.exit(main())
