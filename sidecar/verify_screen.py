"""What `midstream verify` shows in a terminal: its progress, and what it came to.

Progress goes to standard error, so that standard output is the result's alone. Decides nothing.
"""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..loadtest.verify import record, screen
from ..loadtest.verify.judge import Verdict
from ..loadtest.verify.plants import Attempt, Planted
from ..loadtest.verify.verification import Begun, Case, Controlled, Event, Options

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


class Shown:
    """The progress of one verification; a context manager."""

    def __init__(self, options: Options) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
            console=self._console,
        )
        self._part = TaskID(0)
        self._options = options

    def __enter__(self) -> "Shown":
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
        self._console.print(f"[{colour}]{escape(where)}[/{colour}]: {escape(text)}")


def show(told: dict[str, Any]) -> None:
    """The tables of a record."""
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


def tell_check(found: record.Check, told: dict[str, Any], *, as_json: bool) -> int:
    """Say whether a record holds, and return the exit status."""
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
