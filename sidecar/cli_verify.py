"""The command `verify`: compares interrupted answers with undisturbed ones, on the user's own engine and workload.

Owns the options, the sidecar that a verification runs on, and what is shown meanwhile. What is compared and what counts
as proof is `loadtest.verify`.
"""

import asyncio
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Optional

import aiohttp
import typer

from ..loadtest.harness import SidecarProcess
from ..loadtest.verify import record, screen
from ..loadtest.verify.cuts import Way
from ..loadtest.verify.html import page
from ..loadtest.verify.judge import Verdict
from ..loadtest.verify.plants import Attempt, Fault, Planted
from ..loadtest.verify.prompts import MAX_TOKENS, built_in, read_prompts
from ..loadtest.verify.runs import ANSWER_S, Runner
from ..loadtest.verify.verification import Begun, Case, Controlled, Event, Options, Verification
from ..session.errors import ConfigError, EngineError
from .cli_options import AsJson, Assignments
from .config import default_state_dir, parse_worker
from .control_client import ControlClient

START_S = 1800.0
# Snapshots are taken when they are asked for: one that came by itself would replace a planted one. And many kills in a
# row are what is wanted here.
_SETTINGS: dict[str, object] = {"store.snapshot_every_s": 86_400, "supervise.restarts_window_s": 0.001}
_COLOURS = {
    Verdict.IDENTICAL: "green",
    Verdict.RESTORE: "bold red",
    Verdict.VARIANCE: "yellow",
    Verdict.UNSETTLED: "yellow",
}
_STATUS_COLOURS = {
    record.Status.PROVEN: "bold green",
    record.Status.FAILED: "bold red",
    record.Status.OPEN: "bold yellow",
    record.Status.STOPPED: "bold yellow",
}


@dataclass(frozen=True, slots=True)
class _Engines:
    """What is verified: a command that starts a worker, or workers that run."""

    command: tuple[str, ...]
    beside: tuple[str, ...]
    state_dir: Path | None
    settings: dict[str, object]


def verify(
    command: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation
        typer.Argument(metavar="[-- COMMAND...]", help="How the engine is started."),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--prompts", metavar="FILE.jsonl", help="Requests to verify (default: 30 built-in ones)."),
    ] = None,
    cuts: Annotated[int, typer.Option("--cuts", min=1, max=64, help="Interrupted runs of each prompt.")] = 4,
    controls: Annotated[int, typer.Option("--controls", min=2, max=16, help="Undisturbed runs of each prompt.")] = 2,
    kills: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--kills", min=0, max=1, help="Share of interruptions that are a real SIGKILL (default 0.1)."),
    ] = None,
    ways: Annotated[
        str, typer.Option("--ways", help="How answers are interrupted: some of kill,move,disk.")
    ] = "kill,move,disk",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=4, help="Length of answers to prompts that do not say it.")
    ] = MAX_TOKENS,
    seed: Annotated[int, typer.Option("--seed", help="Of cuts and ways; the record says it.")] = 1,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", min=1, max=256, help="Prompts at a time; above 1 most engines vary by themselves."
        ),
    ] = 1,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache", help="Let runs find each other's prefixes in the engine's cache."),
    ] = False,
    plants: Annotated[
        bool, typer.Option("--plants/--no-plants", help="Plant three faults and see whether they are found.")
    ] = True,
    worker: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--worker", metavar="[NAME=]URL", help="An engine that runs already; give two or more."),
    ] = None,
    state_dir: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--state-dir", metavar="DIR", help="With --worker: the folder that these engines were told."),
    ] = None,
    as_json: AsJson = False,
    record_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--record", metavar="FILE", help="Write the record (JSON) there."),
    ] = None,
    html_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one self-contained page there."),
    ] = None,
    check_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--check", metavar="RECORD", help="Say whether a record holds for this engine; compares no answers."
        ),
    ] = None,
    assignments: Assignments = None,
) -> int:
    """Prove, on your engine and your prompts, that interrupted answers go on exactly.

    \b
    midstream verify -- vllm serve MODEL
    midstream verify --prompts mine.jsonl --record proof.json --html proof.html -- vllm serve MODEL
    midstream verify --check proof.json -- vllm serve MODEL

    Exit status: 0 every answer was identical and every planted fault was found; 1 a restore changed an answer, or a
    planted fault was not found, or the record does not hold; 4 nothing failed, and not everything is proven.
    """
    engines = _engines(command or [], worker or [], state_dir, assignments or [])
    if check_file is not None:
        told = record.read(check_file)
        return _tell_check(asyncio.run(_check(engines, told)), told, as_json)
    chosen = _ways(ways)
    if kills is None:
        # An engine that others started may not be started again by anybody.
        kills = 0.0 if engines.beside and chosen != (Way.KILL,) else 0.1
    options = Options(
        prompts=read_prompts(prompts, max_tokens) if prompts is not None else built_in(max_tokens),
        cuts=cuts,
        controls=controls,
        kill_share=kills,
        ways=chosen,
        seed=seed,
        concurrency=concurrency,
        faults=tuple(Fault) if plants else (),
    )
    for file in (record_file, html_file):
        # Said now, and not after half an hour.
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}; make it, or name a file elsewhere")
    told = asyncio.run(_verify(engines, options, isolate=not prefix_cache))
    if record_file is not None:
        record.write(record.text(told), record_file)
    if html_file is not None:
        record.write(page(told), html_file)
    if as_json:
        print(json.dumps(told))
    else:
        _show(told)
    if told["stopped"]:
        print(f"midstream: the verification stopped: {told['stopped']}", file=sys.stderr)
    return record.status(told)


def _engines(
    command: Sequence[str], workers: Sequence[str], state_dir: str | None, assignments: Sequence[str]
) -> _Engines:
    if bool(command) == bool(workers):
        raise ConfigError(
            "name what is to be verified: either the engine's command after --, or --worker URL twice or more"
        )
    settings = dict(_SETTINGS)
    for text in assignments:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: expected KEY=VALUE")
        settings[name] = value
    if workers:
        if len(workers) < 2:
            raise ConfigError("one worker has nobody to hand a session to; name two or more with --worker")
        beside = [f"{w.name}={w.url}" for w in map(_parsed, workers, range(len(workers)))]
        return _Engines((), tuple(beside), Path(state_dir or default_state_dir()), settings)
    if state_dir is not None:
        raise ConfigError("--state-dir goes with --worker; a sidecar of verify's own has a folder of its own")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]}: no such command on the path; activate the engine's environment or give its path"
        )
    return _Engines(tuple(command), (), None, settings)


def _parsed(text: str, index: int) -> Any:
    try:
        return parse_worker(text, index)
    except ValueError as error:
        raise ConfigError(f"--worker {text}: {error}") from error


def _ways(text: str) -> tuple[Way, ...]:
    try:
        ways = tuple(dict.fromkeys(Way(word.strip()) for word in text.split(",")))
    except ValueError:
        raise ConfigError(f"--ways {text}: give some of {','.join(Way)} with commas between") from None
    return ways


class _Bench:
    """A sidecar, its engines and a runner on them, for as long as the context lasts."""

    def __init__(self, engines: _Engines, *, workers: int = 2, isolate: bool = True) -> None:
        self._engines = engines
        self._isolate = isolate
        self._workers = workers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "_Bench":
        try:
            return await self._open()
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self) -> "_Bench":
        self.store = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-verify-")))
        self.sidecar = SidecarProcess(
            self._engines.command,
            workers=self._workers,
            settings=self._engines.settings,
            store=self.store,
            beside=self._engines.beside,
            state_dir=self._engines.state_dir,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        self._stack.push_async_callback(asyncio.to_thread, self.sidecar.stop)
        await self.sidecar.start(http, timeout_s=START_S)
        self.key = await self._common_key(http)
        models = await self.sidecar.ask(http, "/v1/models")
        try:
            self.model = str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"the engine lists no model: /v1/models answered {str(models)[:200]}") from None
        control = await self._stack.enter_async_context(ControlClient(self.sidecar.state_dir))
        self.runner = Runner(self.sidecar, http, control, self.model, isolate=self._isolate)
        return self

    async def _common_key(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        keys: dict[str, dict[str, Any]] = {w["name"]: w["key"] or {} for w in await self.sidecar.workers(http)}
        if without := sorted(name for name, key in keys.items() if not key):
            raise EngineError(
                f"{', '.join(without)} said nothing of its compatibility key: the plugin does not run there, so no "
                f"session could go on exactly; see `midstream doctor`\n{self.sidecar.last_lines(5)}"
            )
        first = next(iter(keys.values()))
        for name, key in keys.items():
            if changed := record.changes(first, key):
                raise EngineError(
                    f"{name} has another key ({', '.join(changed)}): sessions could not go on there exactly"
                )
        return dict(first)


async def _verify(engines: _Engines, options: Options, *, isolate: bool) -> dict[str, Any]:
    began_s = time.monotonic()
    with _Shown(options) as shown:
        async with _Bench(engines, isolate=isolate) as bench:
            work = Verification(bench.runner, bench.store, int(bench.key["block_tokens"]), options, shown.tell)
            found = await work.run()
            identity = _identity(bench, engines)
    told = record.record(found, options, identity, time.monotonic() - began_s)
    told["settings"]["prefix_cache"] = "isolated" if isolate else "shared"
    return told


async def _check(engines: _Engines, told: dict[str, Any]) -> record.Check:
    async with _Bench(engines, workers=1) as bench:
        return record.check(told, bench.key, metadata.version("midstream"))


def _identity(bench: _Bench, engines: _Engines) -> record.Identity:
    return record.Identity(
        key=bench.key,
        model=bench.model,
        midstream=metadata.version("midstream"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        host={"platform": platform.platform(), "python": platform.python_version()},
        command=engines.command or engines.beside,
    )


class _Shown:
    """Progress on standard error, so that standard output is the result's alone."""

    def __init__(self, options: Options) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
            console=self._console,
        )
        self._part: Any = None
        self._options = options

    def __enter__(self) -> "_Shown":
        if self._options.concurrency > 1:
            self._console.print(
                f"[yellow]{self._options.concurrency} prompts at a time: most engines' numbers depend on what else "
                "they compute, so undisturbed runs may differ among themselves[/yellow]"
            )
        self._progress.start()
        self._part = self._progress.add_task("starting the engine", total=None, last="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, event: Event) -> None:
        """One thing happened."""
        match event:
            case Begun():
                self._finish()
                self._part = self._progress.add_task(event.part, total=event.steps, last="")
            case Controlled():
                self._step(event.prompt.name)
                if event.error:
                    self._say(f"no undisturbed answer: {event.error}", event.prompt.name, "yellow")
                elif not event.spread.agree:
                    self._say("undisturbed runs differ", event.prompt.name, "yellow")
            case Case():
                verdict = event.judgement.verdict
                self._step(f"{event.prompt} {event.task.column} {event.task.way.value}: {verdict.value}")
                if verdict is not Verdict.IDENTICAL:
                    where = f"{event.prompt} {event.task.column} {event.task.way.value}"
                    self._say(f"{verdict.value}: {event.judgement.why}", where, _COLOURS.get(verdict, "yellow"))
            case Attempt():
                self._progress.update(self._part, last=f"{event.verdict}")
            case Planted():
                self._step(f"{event.fault.value}: {'found' if event.found else 'NOT FOUND'}")
                if not event.found:
                    self._say(f"not found in {len(event.attempts)} attempts", event.fault.value, "bold red")

    def _step(self, last: str) -> None:
        self._progress.update(self._part, advance=1, last=last[:60])

    def _finish(self) -> None:
        task = self._progress.tasks[self._part]
        if task.total is None:
            self._progress.update(self._part, total=1, completed=1)
        self._progress.update(self._part, last="")

    def _say(self, text: str, where: str, colour: str) -> None:
        from rich.markup import escape

        self._console.print(f"[{colour}]{escape(where)}[/{colour}]: {escape(text)}")


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    status = record.status(told)
    facts = Table(show_header=False, box=None)
    for name, value in screen.facts(told):
        facts.add_row(f"[dim]{name}[/dim]", escape(value))
    console.print(facts)
    verdicts = Table("verdict", "cases", "what it means")
    for name, count, meaning in screen.counts(told):
        verdicts.add_row(f"[{_COLOURS.get(Verdict(name), 'yellow')}]{name}[/]" if count else name, str(count), meaning)
    console.print(verdicts)
    gaps = Table("client's gap, ms", "cases", "p50", "p90", "p99", "max")
    for way, figures in told["recovery_ms"].items():
        gaps.add_row(way, str(figures["count"]), *(f"{figures[name]:.0f}" for name in ("p50", "p90", "p99", "max")))
    console.print(gaps)
    planted = Table("planted fault", "found", "attempts", "where")
    for plant in told["plants"]:
        last = plant["attempts"][-1]
        found = "[green]yes[/green]" if plant["found"] else "[bold red]NO[/bold red]"
        planted.add_row(plant["fault"], found, str(len(plant["attempts"])), escape(last["where"]))
    if told["plants"]:
        console.print(planted)
    if lines := screen.differences(told):
        table = Table("prompt", "cut", "way", "verdict", "first difference", "why")
        for line in lines[:50]:
            table.add_row(*(escape(line[name]) for name in ("prompt", "cut", "way", "verdict", "first", "why")))
        console.print(table)
    for text in told["advice"]:
        console.print(f"[yellow]what to set[/yellow]: {escape(text)}")
    console.print(f"[{_STATUS_COLOURS[status]}]{escape(screen.headline(told, status))}[/]")


def _tell_check(found: record.Check, told: dict[str, Any], as_json: bool) -> int:
    if as_json:
        changed = {name: {"then": then, "now": now} for name, (then, now) in found.changed.items()}
        print(json.dumps({"holds": found.holds, "proven": found.proven, "changed": changed}))
    else:
        if not found.proven:
            print("the record itself is no proof: not every answer was identical, or not every planted fault was found")
        for name, (then, now) in found.changed.items():
            print(f"{name} changed: {then} -> {now}")
        date = told["identity"]["date"]
        print(f"the record of {date} holds for what runs now" if found.holds else f"the record of {date} does not hold")
    return int(record.Status.PROVEN if found.holds else record.Status.FAILED)
