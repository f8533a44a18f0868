"""One verification: controls, interrupted runs, planted faults, in an order in which nothing disturbs anything else.

Owns that order. Invariant: controls come before what is judged by them; real kills come after all planned moves and run
alone, because a kill interrupts whatever its worker was writing; plants come last, for they put wrong KV into engines.
A failure is believed only after more controls were run and agree too. It prints nothing: it tells what happened.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from ...session.errors import MidstreamError
from .cuts import Task, Way, place, plan
from .judge import ADVICE, Judgement, Reading, Settling, Spread, Verdict, judge, settling, spread
from .plants import Attempt, Fault, Planted, Planter
from .prompts import Prompt
from .runs import Run, Runner

# What was over before it could be cut is cut earlier, so often; a kill costs an engine's restart.
TRIES = 8
KILL_TRIES = 3
EARLIER_TOKENS = 4
# The mover's word: a worker that lives on after a planned move may come to the end of the answer by itself.
SOURCE_FINISHED = "finished"
# Before a difference is called the restore's, so many more undisturbed runs have to agree.
MORE_CONTROLS = 2
INTERRUPTED = "it was interrupted"


@dataclass(frozen=True, slots=True)
class Options:
    """What is verified. `kill_share`: which part of all interruptions is a real SIGKILL."""

    prompts: tuple[Prompt, ...]
    cuts: int = 4
    controls: int = 2
    kill_share: float = 0.1
    ways: tuple[Way, ...] = tuple(Way)
    seed: int = 1
    concurrency: int = 1
    faults: tuple[Fault, ...] = tuple(Fault)


@dataclass(frozen=True, slots=True)
class Controlled:
    """The undisturbed runs of one prompt. `error`: why there are none; `left_out`: fields that the engine refused."""

    prompt: Prompt
    how: Settling
    readings: tuple[Reading, ...] = ()
    left_out: tuple[str, ...] = ()
    error: str = ""

    @property
    def spread(self) -> Spread:
        """How far they are from each other."""
        return spread(self.readings)

    @property
    def length(self) -> int:
        """Tokens of the shortest one, which no cut may be beyond."""
        return min(len(reading.tokens) for reading in self.readings)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, as the engine counts them."""
        return int(self.readings[0].usage[0] or 0)


@dataclass(frozen=True, slots=True)
class Case:
    """One interruption and its verdict.

    `tries`: how often it was cut, earlier each time, until a cut came before the end of the answer. `top`: what an
    undisturbed run chose from, where this one went another way. `log`: what the sidecar's log says of the session,
    where it was not proven to be exact.
    """

    task: Task
    prompt: str
    at: int
    run: Run
    judgement: Judgement
    tries: int = 1
    top: tuple[tuple[str, float], ...] = ()
    log: tuple[str, ...] = ()


@dataclass(slots=True)
class Findings:
    """All that a verification came to. `stopped`: why it could not go on to its end; what it found before counts."""

    controlled: list[Controlled] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    planted: list[Planted] = field(default_factory=list)
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A part begins that has so many steps."""

    part: str
    steps: int


Event = Begun | Controlled | Case | Attempt | Planted


class Verification:
    """Carries out one verification."""

    def __init__(
        self, runner: Runner, store: Path, block_tokens: int, options: Options, tell: Callable[[Event], None]
    ) -> None:
        self._runner = runner
        self._planter = Planter(runner, store, block_tokens, options.seed)
        self._options = options
        self._tell = tell
        self._controlled: dict[int, Controlled] = {}
        self._cases: list[Case] = []

    async def run(self) -> Findings:
        """Everything, once. An engine that goes away ends it, and so does a cancellation (a signal, at the command
        line); neither loses anything of what was found.
        """
        tasks = plan(
            self._options.seed,
            len(self._options.prompts),
            self._options.cuts,
            self._options.ways,
            self._options.kill_share,
        )
        planted: list[Planted] = []
        stopped = ""
        try:
            await self._interrupt(tasks)
            await self._plant(planted)
        except (MidstreamError, OSError, aiohttp.ClientError) as error:
            stopped = f"{error or type(error).__name__}"
        except asyncio.CancelledError:
            stopped = INTERRUPTED
            # It was heeded: what is left to do, the ending of the engines, has deadlines of its own.
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
        controlled = [self._controlled[i] for i in sorted(self._controlled)]
        return Findings(controlled, self._in_order(tasks), planted, stopped)

    async def _interrupt(self, tasks: Sequence[Task]) -> None:
        gentle = [t for t in tasks if t.way is not Way.KILL]
        kills = [t for t in tasks if t.way is Way.KILL]
        self._tell(Begun("undisturbed and moved", len(self._options.prompts) + len(gentle)))
        await self._prompts(gentle)
        if kills:
            self._tell(Begun("killed", len(kills)))
        for task in kills:
            await self._case(task)

    async def _plant(self, planted: list[Planted]) -> None:
        if self._options.faults:
            self._tell(Begun("planted faults", len(self._options.faults)))
        for fault in self._options.faults:
            planted.append(await self._planter.plant(fault, self._tell))
            self._tell(planted[-1])

    async def _prompts(self, tasks: Sequence[Task]) -> None:
        """Prompt by prompt, some of them at a time; the runs of one prompt never overlap."""
        waiting = iter(range(len(self._options.prompts)))

        async def work() -> None:
            for index in waiting:
                controlled = self._controlled[index] = await self._control(self._options.prompts[index])
                self._tell(controlled)
                for task in tasks:
                    if task.prompt == index:
                        await self._case(task)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _control(self, prompt: Prompt) -> Controlled:
        left_out: tuple[str, ...] = ()
        readings: list[Reading] = []
        while len(readings) < self._options.controls:
            reading = await self._runner.undisturbed(prompt)
            if reading.faults and prompt.optional and not readings:
                # The engine may not know what the prompt asks for; without it, it is a prompt like any other.
                left_out, prompt = prompt.optional, prompt.without_optional()
                continue
            if reading.faults or not reading.tokens:
                why = reading.faults[0] if reading.faults else "the answer had no tokens"
                return Controlled(prompt, settling(prompt.body), left_out=left_out, error=why)
            readings.append(reading)
        return Controlled(prompt, settling(prompt.body), tuple(readings), left_out)

    async def _case(self, task: Task) -> None:
        controlled = self._controlled[task.prompt]
        if controlled.error:
            return
        at = place(task, controlled.length, self._options.seed)
        tries = 0
        while True:
            tries += 1
            run = await self._runner.interrupted(
                controlled.prompt, task.way, at, lag=task.lag, prompt_len=controlled.prompt_len
            )
            judgement = judge(controlled.readings, run.reading, controlled.how, run.interruption)
            if not _too_late(run, judgement) or tries == (KILL_TRIES if task.way is Way.KILL else TRIES):
                break
            at = max(at - EARLIER_TOKENS * 2 ** (tries - 1), 1)
        top: tuple[tuple[str, float], ...] = ()
        if judgement.verdict is Verdict.RESTORE:
            controlled, judgement = await self._confirmed(task.prompt, run)
            if judgement.difference is not None and judgement.difference.first is not None:
                top = tuple(await self._runner.top_logprobs(controlled.prompt, judgement.difference.first))
        log = () if judgement.verdict is Verdict.IDENTICAL else self._runner.log_of(run.session)
        case = Case(task, controlled.prompt.name, at, run, judgement, tries, top, log)
        self._cases.append(case)
        self._tell(case)

    async def _confirmed(self, prompt: int, run: Run) -> tuple[Controlled, Judgement]:
        """The verdict again, beside more controls."""
        old = self._controlled[prompt]
        more = [await self._runner.undisturbed(old.prompt) for _ in range(MORE_CONTROLS)]
        readings = (*old.readings, *(reading for reading in more if not reading.faults))
        new = self._controlled[prompt] = Controlled(old.prompt, old.how, readings, old.left_out)
        return new, judge(readings, run.reading, old.how, run.interruption)

    def _in_order(self, tasks: Sequence[Task]) -> list[Case]:
        """All cases, each judged beside all controls that there are by now."""
        rank = {(task.prompt, task.column): index for index, task in enumerate(tasks)}
        found = []
        for case in sorted(self._cases, key=lambda case: rank[(case.task.prompt, case.task.column)]):
            by = self._controlled[case.task.prompt]
            found.append(replace(case, judgement=judge(by.readings, case.run.reading, by.how, case.run.interruption)))
        return found


def _too_late(run: Run, judgement: Judgement) -> bool:
    """Whether the answer was through before it was cut, or before its KV could be fetched from the worker it left."""
    ended_meanwhile = judgement.verdict is Verdict.RECOMPUTED and run.detail == SOURCE_FINISHED
    return judgement.verdict is Verdict.MISSED or ended_meanwhile


def advice(found: Findings) -> tuple[str, ...]:
    """What to set, so that what was not settled can be."""
    open_cases = {c.prompt for c in found.cases if c.judgement.verdict in (Verdict.UNSETTLED, Verdict.VARIANCE)}
    hows = [c.how for c in found.controlled if not c.error and (c.prompt.name in open_cases or not c.spread.agree)]
    return tuple(dict.fromkeys(ADVICE[how] for how in hows))
