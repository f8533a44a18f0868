"""A whole load test: every strategy in turn, on the same requests and the same faults.

Owns the order. First `engine` and `control`, undisturbed; then each strategy with the faults, each on a sidecar of its
own, freshly started. Invariant: whatever was started is ended, also when something fails.
"""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp

from ...session.errors import ConfigError, MidstreamError
from ..harness import SidecarProcess
from .arrivals import Arrival, constant, poisson, repeated
from .dataset import Entry
from .drive import Pace
from .fault_plan import Plan
from .passes import Load, Pass, Passed
from .relay import wrapped
from .strategies import FAULTY, Engines, Strategy, route_of, settings_of
from .strike import Logged, Striker
from .synthetic import Tokens
from .tokens import learn_tokens, model_name
from .workload import Ask, Shape, draw_asks

Tell = Callable[[str], None]
# With no bound of its own a pass by time has this many requests to go round in.
ASKS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Options:
    """What a user asked for. `rate` None with no trace is the closed loop of `concurrency` streams."""

    command: tuple[str, ...]
    shape: Shape
    strategies: tuple[Strategy, ...]
    plan: Plan
    url: str = ""
    workers: int = 2
    seed: int = 1
    requests: int | None = 100
    duration_s: float | None = None
    rate: float | None = None
    is_poisson: bool = True
    trace: tuple[Arrival, ...] = ()
    entries: tuple[Entry, ...] = ()
    concurrency: int = 8
    controls: int = 1
    limit_s: float = 3600.0
    answer_s: float = 900.0
    silence_s: float = 300.0
    start_s: float = 900.0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def is_open_loop(self) -> bool:
        """Whether arrivals wait for nobody."""
        return self.rate is not None or bool(self.trace)

    @property
    def ask_count(self) -> int:
        """How many different requests there are."""
        if self.requests is not None:
            return self.requests
        assert self.duration_s is not None
        per_s = len(self.trace) / max(self.trace[-1].at_s, 1.0) if self.trace else self.rate
        wanted = max(round(self.duration_s * per_s), 1) if per_s is not None else self.concurrency
        return min(wanted, ASKS_MAX)


class LoadTest:
    """Runs one. `passed` holds what is through, so that an interrupted run can still be reported."""

    def __init__(self, options: Options, tell: Tell, say: Tell, on_fault: Callable[[str, Logged], None]) -> None:
        self._options = options
        # What changes all the time, and what is said once.
        self._tell = tell
        self._say = say
        self._on_fault = on_fault
        self._asks: list[Ask] = []
        self._controls: dict[int, list[Sequence[int]]] = defaultdict(list)
        self._http: aiohttp.ClientSession
        self.model = ""
        self.passed: list[Passed] = []

    async def run(self) -> list[Passed]:
        """All passes. MidstreamError when an engine or a sidecar does not come up."""
        options = self._options
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=120.0)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            if options.url:
                await self._beside_a_running_one()
                return self.passed
            if Strategy.ENGINE in options.strategies:
                await self._engines_alone()
            wanted = [strategy for strategy in FAULTY if strategy in options.strategies]
            if wanted or Strategy.ENGINE in options.strategies:
                await self._with_sidecar(Strategy.CONTROL, max(options.controls, 1))
            for strategy in wanted:
                await self._with_sidecar(strategy, 1)
        return self.passed

    async def _beside_a_running_one(self) -> None:
        await self._prepare(self._options.url)
        load = Pass(
            Strategy.URL, self._load(), route_of(Strategy.URL, [self._options.url]), self._http, progress=self._tell
        )
        await self._run(load)

    async def _engines_alone(self) -> None:
        options = self._options
        self._say(f"engine: starting {options.workers} without a sidecar")
        engines = Engines(options.command, options.workers)
        try:
            await engines.start(self._http, timeout_s=options.start_s)
            await self._prepare(engines.urls[0])
            route = route_of(Strategy.ENGINE, engines.urls)
            alone = Pass(Strategy.ENGINE, self._load(), route, self._http, progress=self._tell)
            await alone.warm_up(options.workers)
            await self._run(alone)
        finally:
            await asyncio.to_thread(engines.stop)

    async def _with_sidecar(self, strategy: Strategy, times: int) -> None:
        options = self._options
        plan = options.plan if strategy in FAULTY else Plan()
        async with self._sidecar(strategy, plan) as (sidecar, relays):
            await self._prepare(sidecar.url)
            for turn in range(times):
                name = strategy.value if not turn else f"{strategy.value}-{turn + 1}"
                one = Pass(
                    name,
                    self._load(),
                    route_of(strategy, [sidecar.url]),
                    self._http,
                    sidecar=sidecar,
                    controls=self._controls,
                    progress=self._tell,
                )
                await one.warm_up(options.workers)
                striker = None
                if plan.faults:
                    striker = Striker(
                        plan, sidecar, self._http, one.running, seed=options.seed,
                        are_sessions=strategy is not Strategy.RESTART, relays=relays,
                        on_log=lambda entry: self._on_fault(strategy.value, entry),
                    )  # fmt: skip
                passed = await self._run(one, striker)
                if strategy is Strategy.CONTROL:
                    self._learn(passed)

    async def _run(self, one: Pass, striker: Striker | None = None) -> Passed:
        try:
            return await one.run(striker)
        finally:
            self.passed.append(one.passed)

    def _learn(self, passed: Passed) -> None:
        broken = [record for record in passed.records if not record.success]
        if broken:
            first = broken[0]
            why = "; ".join(filter(None, (first.error, *first.violations)))
            raise MidstreamError(
                f"{len(broken)} of {len(passed.records)} undisturbed answers are not whole ({why}); there is nothing "
                "to compare with: lower the rate, or look at the engine's log"
            )
        for record in passed.records:
            self._controls[record.index].append(record.token_ids)

    @asynccontextmanager
    async def _sidecar(self, strategy: Strategy, plan: Plan) -> AsyncIterator[tuple[SidecarProcess, Path | None]]:
        options = self._options
        self._say(f"{strategy}: starting a sidecar and {options.workers} workers")
        with tempfile.TemporaryDirectory(prefix="midstream-relays-") as folder:
            command, relays = list(options.command), None
            environ: dict[str, str] = {}
            if plan.needs_relay:
                relays = Path(folder)
                command, environ = wrapped(command, relays)
            sidecar = SidecarProcess(
                command,
                workers=options.workers,
                environ=environ,
                settings={**options.settings, **settings_of(strategy, plan)},
            )
            try:
                await sidecar.start(self._http, timeout_s=options.start_s)
                yield sidecar, relays
            finally:
                await asyncio.to_thread(sidecar.stop)

    async def _prepare(self, url: str) -> None:
        """The requests, drawn once, when the first engine is there to count tokens."""
        if self._asks:
            return
        options = self._options
        self.model = await model_name(self._http, url)
        synthetic = not options.entries
        tokens = await learn_tokens(self._http, url, self.model, options.seed) if synthetic else Tokens(0.0, 1.0, None)
        self._asks = await draw_asks(
            options.ask_count,
            options.shape,
            model=self.model,
            seed=options.seed,
            tokens=tokens,
            entries=options.entries,
            arrivals=options.trace,
            progress=self._tell,
        )
        if not self._asks:
            raise ConfigError("no requests to send; give --requests or --duration")

    def _load(self) -> Load:
        options = self._options
        pace = Pace(options.requests, options.duration_s, options.limit_s, options.concurrency)
        return Load(self._asks, pace, self._arrivals, options.answer_s, options.silence_s)

    def _arrivals(self) -> Iterator[Arrival] | None:
        """The same ones for each pass."""
        options = self._options
        if options.trace:
            return repeated(options.trace)
        if options.rate is None:
            return None
        return (
            poisson(options.rate, Random(f"{options.seed}/arrivals")) if options.is_poisson else constant(options.rate)
        )
