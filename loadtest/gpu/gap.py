"""The client's gap when an engine is killed: many sessions of thousands of tokens, and one of tens of thousands.

Owns the scenes and their order. All streams of a scene run on one engine while the other stands by warm and idle; then
the first one's core gets a SIGKILL. The dead engine is started again while the other brings the answers to their end,
so that each scene costs one restart. Which strategy brings them there is the load test's.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

import aiohttp

from ...session.errors import ConfigError, EngineError, MidstreamError
from ..load.fault_plan import Plan
from ..load.figures import ratio
from ..load.gaps import gaps_of
from ..load.live import Live
from ..load.strategies import FAULTY, Strategy, route_of, settings_of
from ..percentiles import percentile
from .clock import Clock
from .deaths import PidfdNews
from .fleet import Fleet, fleet, kill_core
from .models import LARGE, large_options, serve
from .phases import Phases, events, phases
from .results import Results
from .streams import Load, Streams, run_all

PART = "gap"
KV_BYTES = 30 << 30
VICTIM, STANDBY = "a", "b"
# Tokens that the slowest stream has when the engine is killed, and that all of them bring afterwards. The first ones
# take long enough for the mover to see the blocks that the last prefill has filled.
LEAD_TOKENS, REST_TOKENS = 96, 160
# Streams that began first are ahead by what they decode while the others are prefilled.
AHEAD_TOKENS = 192
ADMISSION_S = 20.0
LOOK_S = 0.001
ANSWER_S = 180.0
BACK_S = 240.0
FILLER_TOKENS = 4000
TIER_0_GB_PER_S = 1000.0
# What a gap may take beside its parts.
ALLOWED_MS = 50.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One kill: `strategy:STREAMSxTOKENS` in words."""

    strategy: Strategy
    streams: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.strategy}:{self.streams}x{self.prompt_tokens}"

    @property
    def kv_bytes(self) -> int:
        """KV of all prompts."""
        return self.streams * self.prompt_tokens * LARGE.token_bytes


SCENES = "kv:32x4000,kv:1x32000,recompute:32x4000,recompute:1x32000,restart:32x4000"


def scenes(text: str) -> list[Scene]:
    """The scenes in words. ConfigError."""
    found = []
    for word in filter(None, text.split(",")):
        strategy, _, size = word.strip().partition(":")
        streams, _, tokens = size.partition("x")
        if strategy not in FAULTY or not streams.isdigit() or not tokens.isdigit():
            raise ConfigError(f"--scenes: {word!r} is none; give {'|'.join(FAULTY)}:STREAMSxPROMPT_TOKENS, with commas")
        found.append(Scene(Strategy(strategy), int(streams), int(tokens)))
    return found


@dataclass(frozen=True, slots=True)
class Struck:
    """What a scene came to.

    Gaps are the clients'; `step_ms` is the median time between tokens before the kill; `gone_ms` is when the killed
    core's pidfd told that nothing of it is left.
    """

    gaps_ms: tuple[float, ...]
    step_ms: float
    phases: Phases
    gone_ms: float | None = None


async def measure(
    model: Path, folder: Path, results: Results, clock: Clock, *, wanted: Sequence[Scene], front_ends: int
) -> None:
    """All scenes, as far as there is time. EngineError when an engine or the sidecar does not come up."""
    async with fleet(folder) as engines:
        command = serve(model, *large_options(KV_BYTES), "--api-server-count", str(front_ends))
        for name in (VICTIM, STANDBY):
            engines.add(name, command)
        await engines.front([VICTIM, STANDBY], settings=settings_of(wanted[0].strategy, Plan()))
        for engine in engines.engines.values():
            engine.start()
        await engines.ready([VICTIM, STANDBY], timeout_s=clock.left_s())
        async with aiohttp.ClientSession() as http:
            for engine in engines.engines.values():
                results.add(PART, f"start of {engine.name}", await engine.wait_ready(http, timeout_s=10), "s")
                await engine.warm_up(http)
        await _alone(engines, results)
        took_s = 0.0
        before = wanted[0].strategy
        for number, scene in enumerate(wanted):
            if clock.left_s() < 30.0 + took_s:
                for left in wanted[number:]:
                    results.missing(PART, left.name, "the time was over")
                return
            if scene.strategy is not before:
                await engines.front([VICTIM, STANDBY], settings=settings_of(scene.strategy, Plan()))
                before = scene.strategy
            if number:
                await engines.ready([VICTIM, STANDBY], timeout_s=min(clock.left_s(), BACK_S))
                took_s = engines.engines[VICTIM].ready_after_s or 0.0
                results.add(PART, f"restart before {scene.name}", took_s, "s")
                async with aiohttp.ClientSession() as http:
                    await engines.engines[VICTIM].warm_up(http)
            try:
                struck = await _scene(engines, scene, is_last=number + 1 == len(wanted))
            except MidstreamError as error:
                # What comes after it may still work, and a start has been paid for.
                print(f"{error}\n{engines.describe()}", flush=True)
                results.missing(PART, scene.name, str(error).splitlines()[0])
                await engines.begin_again(VICTIM)
            else:
                tell(scene, struck, results)


async def _alone(engines: Fleet, results: Results) -> None:
    """Prefill on the idle standby, without any sidecar: what recomputing takes from the request on, at the least."""
    for streams, tokens in ((32, 4000), (1, 32_000)):
        route = route_of(Strategy.ENGINE, [engines.engines[STANDBY].url])
        lives = await run_all(route, Load(streams, tokens, 2, f"prefill/{streams}"), timeout_s=60.0)
        firsts = [1000 * (live.marks[0].at_s - live.sent_s) for live in lives if live.marks]
        name = f"prefill {streams}x{tokens}, engine alone"
        results.add(PART, f"{name}, p50", percentile(firsts, 50), "ms")
        results.add(PART, f"{name}, p99", percentile(firsts, 99), "ms")


async def _scene(engines: Fleet, scene: Scene, *, is_last: bool) -> Struck:
    assert engines.sidecar is not None
    sidecar = engines.sidecar
    print(f"scene {scene.name}", flush=True)
    load = Load(scene.streams, scene.prompt_tokens, LEAD_TOKENS + AHEAD_TOKENS + REST_TOKENS, f"gap/{scene.name}")
    streams = Streams(route_of(scene.strategy, [sidecar.url]), answer_s=ANSWER_S)
    news: PidfdNews | None = None
    try:
        await _send_to_victim(engines, scene, streams, load)
        await streams.until(
            lambda: min(len(live.tokens) for live in streams.lives) >= LEAD_TOKENS,
            f"{scene.name}: {LEAD_TOKENS} tokens of each stream",
            timeout_s=60.0,
        )
        step_ms = _step_ms(streams.lives)
        killed_at, killed_s = datetime.now(), time.perf_counter()
        core = kill_core(engines.engines[VICTIM])
        news = PidfdNews(core.pid, killed_s)
        print(
            f"{scene.name}: killed {core.pid}, streams had {[len(live.tokens) for live in streams.lives]}", flush=True
        )
        had = {id(live): len(live.tokens) for live in streams.lives}
        await streams.until(
            lambda: all(len(live.tokens) > had[id(live)] + 1 or live.ended_s is not None for live in streams.lives),
            f"{scene.name}: a token of each stream after the kill",
            timeout_s=ANSWER_S,
        )
        if not is_last:
            await engines.begin_again(VICTIM)
        await streams.finish(timeout_s=ANSWER_S)
    finally:
        await streams.close()
        if news is not None:
            news.close()
    gaps_ms = [1000 * gap_s for live in streams.lives for gap_s in gaps_of(live.sent_s, live.marks, [killed_s], 1)]
    lines = sidecar.log.read_text(errors="replace").splitlines()
    return Struck(tuple(gaps_ms), step_ms, phases(events(lines, killed_at)), news.gone_ms)


async def _send_to_victim(engines: Fleet, scene: Scene, streams: Streams, load: Load) -> None:
    """All streams to one engine. A sidecar spreads sessions, so each is answered by a short one on the standby."""
    if scene.strategy is Strategy.RESTART:
        # No sessions: they go to the first worker that is ready.
        for ask in load.asks():
            streams.send(ask)
        return
    assert engines.sidecar is not None
    fillers = Streams(route_of(scene.strategy, [engines.sidecar.url]), answer_s=ANSWER_S)
    short = Load(load.streams, 8, FILLER_TOKENS, f"{load.seed}/fillers").asks()
    try:
        for ask, filler in zip(load.asks(), short, strict=True):
            before = await _session_counts(engines)
            streams.send(ask)
            await _admitted(engines, VICTIM, before[VICTIM] + 1)
            fillers.send(filler)
            await _admitted(engines, STANDBY, before[STANDBY] + 1)
    finally:
        await fillers.close()
    await engines.quiet(STANDBY)
    counts = await _session_counts(engines)
    if counts != {VICTIM: load.streams, STANDBY: 0}:
        raise EngineError(f"{scene.name}: the streams are not all on one engine: {counts}")


async def _session_counts(engines: Fleet) -> dict[str, int]:
    return {name: int((await engines.worker(name))["sessions"]) for name in (VICTIM, STANDBY)}


async def _admitted(engines: Fleet, name: str, count: int) -> None:
    deadline_s = time.monotonic() + ADMISSION_S
    while (counts := await _session_counts(engines))[name] < count:
        if time.monotonic() > deadline_s:
            raise EngineError(f"worker {name} did not get session {count} within {ADMISSION_S:g} s: {counts}")
        await asyncio.sleep(LOOK_S)


def _step_ms(lives: Sequence[Live]) -> float:
    """The median wait between the last arrivals so far."""
    waits = [b.at_s - a.at_s for live in lives for a, b in zip(live.marks[-17:], live.marks[-16:], strict=False)]
    return 1000 * median(waits) if waits else 0.0


def allowed_ms(scene: Scene, struck: Struck) -> float:
    """The most that a gap may be with KV in tier 0: detection, the copy at the tier's rate, two steps, and a rest."""
    copy_ms = 1000 * scene.kv_bytes / (TIER_0_GB_PER_S * 1e9) * 1.25
    return (struck.phases.detection_ms or 0.0) + copy_ms + 2 * struck.step_ms + ALLOWED_MS


def tell(scene: Scene, struck: Struck, results: Results) -> None:
    """The figures of one scene."""
    told = struck.phases.told()
    found = struck.gaps_ms
    if len(found) != scene.streams:
        results.missing(PART, scene.name, f"{len(found)} of {scene.streams} streams went on; {told}")
        return
    bar = allowed_ms(scene, struck) if scene.strategy is Strategy.KV else None
    results.add(PART, f"{scene.name} gap p50", percentile(found, 50), "ms")
    results.add(
        PART, f"{scene.name} gap p99", percentile(found, 99), "ms", bar=bar, max=round(max(found), 3),
        step_ms=round(struck.step_ms, 3), **told,
    )  # fmt: skip
    if scene.strategy is Strategy.RESTART:
        return
    results.add(
        PART, f"{scene.name} detection", struck.phases.detection_ms, "ms", bar=20.0, by=struck.phases.told_by,
    )  # fmt: skip
    if struck.gone_ms is not None:
        results.add(PART, f"{scene.name} core gone (pidfd)", struck.gone_ms, "ms")
    else:
        results.missing(PART, f"{scene.name} core gone (pidfd)", "its parent had collected it already")
    if scene.strategy is Strategy.KV:
        results.add(
            PART, f"{scene.name} copy rate", struck.phases.copy_gb_per_s, "GB/s", bar=TIER_0_GB_PER_S, at_least=True,
        )  # fmt: skip
        exact = struck.phases.outcomes.get("exact", 0)
        results.add(PART, f"{scene.name} exact", exact, "sessions", bar=scene.streams, at_least=True)


def compare(results: Results) -> None:
    """What the strategies come to beside each other."""
    by_name = {figure.name: figure.value for figure in results.figures if figure.part == PART}
    for size, least in (("32x4000", None), ("1x32000", 10.0)):
        kv = by_name.get(f"kv:{size} gap p99")
        for other in ("recompute", "restart"):
            value = by_name.get(f"{other}:{size} gap p99")
            if kv and value and (over := ratio(value, kv)) is not None:
                results.add(PART, f"{size}, {other} over kv, p99", over, bar=least, at_least=True)
