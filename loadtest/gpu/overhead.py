"""What midstream costs while nothing happens: the same engine with and without it, run by run in turn.

Owns the order of the runs. Two engines of one command share the card, one alone and one beside a sidecar, and take
turns under the same load, so that whatever drifts drifts for both. Tier 0 first, then with copies in the host's memory,
then with snapshots on disk.
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from ..load.sender import Route
from ..load.strategies import Strategy, route_of
from .clock import Clock
from .engines import Engine
from .fleet import Fleet, fleet
from .kinds import VLLM, EngineKind
from .results import Results
from .streams import Load, run_all
from .windows import Overhead, Steady, histogram, overhead, steady

PART = "overhead"
KV_BYTES = 28 << 30
RUN_S = 60.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the load, the most that it may cost in percent, and what the sidecar is told for it."""

    name: str
    bar_percent: float | None = None
    settings: Mapping[str, object] | None = None
    stores: bool = False


ALONE = Variant("alone")
HELD = Variant("held", 0.5)
# As by default where there is a tier 1.
BLOCKS = Variant("blocks", settings={"tier1.bytes": 32 << 30, "tier1.bandwidth": 50_000_000_000})
# As much as can be asked for: the tail of each session with every new token, and room for all of a run.
MEMORY = Variant("memory", 2.0, {"tier1.bytes": 32 << 30, "tier1.tail": 1, "tier1.bandwidth": 50_000_000_000})
DISK = Variant(
    "disk",
    settings={"store.snapshot_every_s": 0.05, "store.tail_every_tokens": 1, "store.bytes_max": 24 << 30},
    stores=True,
)
VARIANTS = {variant.name: variant for variant in (HELD, BLOCKS, MEMORY, DISK)}
NAMES = tuple(VARIANTS)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one variant; `engine_itl_ms` is the engine's own mean."""

    window: Steady
    engine_itl_ms: float | None


async def measure(
    model: Path,
    folder: Path,
    results: Results,
    clock: Clock,
    *,
    rounds: int = 5,
    load: Load | None = None,
    kind: EngineKind = VLLM,
    variants: Sequence[str] = NAMES,
) -> None:
    """All of it. EngineError when an engine or the sidecar does not come up."""
    load = load or Load(streams=64, prompt_tokens=2000, output_tokens=512, seed="overhead")
    async with fleet(folder) as engines:
        command = kind.serve(model, *kind.large(KV_BYTES))
        alone = engines.add("alone", command, alone=True, kind=kind)
        beside = engines.add("a", command, kind=kind)
        await engines.front(["a"])
        for engine in (alone, beside):
            engine.start()
        await engines.ready(["alone", "a"], timeout_s=clock.left_s())
        async with aiohttp.ClientSession() as http:
            for engine in (alone, beside):
                results.add(PART, f"start of {engine.name}", await engine.wait_ready(http, timeout_s=10), "s")
                await engine.warm_up(http)
            for variant in [VARIANTS[name] for name in variants]:
                await _variant(variant, engines, alone, beside, load, results, clock, rounds, http)


async def _variant(
    variant: Variant,
    engines: Fleet,
    alone: Engine,
    beside: Engine,
    load: Load,
    results: Results,
    clock: Clock,
    rounds: int,
    http: aiohttp.ClientSession,
) -> None:
    with tempfile.TemporaryDirectory(prefix="midstream-store-") as store:
        if variant.settings is not None:
            await engines.front(["a"], settings=variant.settings, store=Path(store) if variant.stores else None)
            await engines.ready(["a"], timeout_s=60)
        assert engines.sidecar is not None
        routes = {
            ALONE.name: (alone, route_of(Strategy.ENGINE, [alone.url])),
            variant.name: (beside, route_of(Strategy.KV, [engines.sidecar.url])),
        }
        runs: dict[str, list[Run]] = defaultdict(list)
        # The first round of all warms what a first full batch warms, and is not counted.
        for number in range(rounds + 1):
            if clock.left_s() < RUN_S:
                results.missing(PART, f"{variant.name}, rounds {number} to {rounds}", "the time was over")
                break
            for name in (ALONE.name, variant.name) if number % 2 else (variant.name, ALONE.name):
                engine, route = routes[name]
                run = await _run(engine, route, load, f"{variant.name}/{number}/{name}", http)
                if run is not None and number:
                    runs[name].append(run)
        _tell(variant, runs[ALONE.name], runs[variant.name], results)
        status = await engines.sidecar.ask(http, "/midstream/v1/status")
        print(f"{variant.name}: mover {status.get('mover')}", flush=True)
        if variant.stores:
            # Before its folder goes.
            await engines.end_sidecar()


async def _run(engine: Engine, route: Route, load: Load, seed: str, http: aiohttp.ClientSession) -> Run | None:
    before = await _metrics(engine, http)
    asked = Load(load.streams, load.prompt_tokens, load.output_tokens, f"{load.seed}/{seed}")
    lives = await run_all(route, asked, timeout_s=RUN_S)
    window = steady(lives)
    name = engine.kind.inter_token_latency
    itl_ms = histogram(await _metrics(engine, http), name).mean_ms_since(histogram(before, name))
    print(f"run {seed}: {window} engine_itl_ms={itl_ms}", flush=True)
    return None if window is None else Run(window, itl_ms)


async def _metrics(engine: Engine, http: aiohttp.ClientSession) -> str:
    async with http.get(f"{engine.url}/metrics") as answer:
        return await answer.text()


def _tell(variant: Variant, alone: Sequence[Run], beside: Sequence[Run], results: Results) -> None:
    """The figures of a variant beside those of the engine alone."""
    if not alone or not beside:
        results.missing(PART, variant.name, "no pair of runs had a window in which all streams decoded")
        return
    for name, runs in ((ALONE.name, alone), (variant.name, beside)):
        ordered = sorted(run.window.tpot_ms for run in runs)
        throughput = sorted(run.window.tokens_per_s for run in runs)
        where = name if name == variant.name else f"{name} (beside {variant.name})"
        results.add(PART, f"{where} tpot p50", ordered[len(ordered) // 2], "ms", runs=len(runs))
        results.add(PART, f"{where} throughput", throughput[len(throughput) // 2], "tokens/s", runs=len(runs))
    pairs = {
        "tpot": overhead([r.window.tpot_ms for r in alone], [r.window.tpot_ms for r in beside]),
        "throughput": _inverse([r.window.tokens_per_s for r in alone], [r.window.tokens_per_s for r in beside]),
        "engine's own itl": overhead([r.engine_itl_ms or 0.0 for r in alone], [r.engine_itl_ms or 0.0 for r in beside]),
    }
    for name, found in pairs.items():
        if found is None:
            results.missing(PART, f"{variant.name} costs of {name}", "the engine tells none")
            continue
        results.add(
            PART, f"{variant.name} costs of {name}", found.percent, "%",
            bar=variant.bar_percent, low=round(found.low, 3), high=round(found.high, 3), pairs=found.pairs,
        )  # fmt: skip


def _inverse(alone: Sequence[float], beside: Sequence[float]) -> Overhead | None:
    """Of a rate: how much less of it there is, told as time that is taken more."""
    return overhead([1 / rate for rate in alone], [1 / rate for rate in beside])
