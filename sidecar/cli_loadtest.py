"""The command `loadtest`: its options, its progress, and its exit status. What it does is in `loadtest/load/`."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..session.errors import ConfigError
from .cli_engines import assigned, require_command
from .cli_options import AsJson, Assignments
from .environments import Progress
from .interruptible import run_interruptible

if TYPE_CHECKING:
    pass

# Where midstream itself brings interrupted answers to their end.
_KEEP_TOKENS = ("kv", "url", "recompute")


def loadtest(
    command: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation
        typer.Argument(metavar="-- COMMAND...", help="How the engine is started."),
    ] = None,
    url: Annotated[str, typer.Option("--url", help="A running sidecar or engine instead; then without faults.")] = "",
    rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--rate", help="Requests a second, whatever the answers do (open loop)."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option("--arrivals", metavar="poisson|constant|FILE", help="How they are spread; or a trace.")
    ] = "poisson",
    requests: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--requests", min=1, max=100_000, help="How many different requests (default 100)."),
    ] = None,
    duration: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--duration", min=0.1, max=86_400, help="For how many seconds, instead of --requests."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=10_000, help="Without --rate: so many streams at once.")
    ] = 8,
    concurrency_max: Annotated[
        int, typer.Option("--concurrency-max", min=1, max=10_000, help="With --rate: at most so many at once.")
    ] = 1000,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            "--prompt-tokens", metavar="N|uniform:A-B|lognormal:MEDIAN,SIGMA[:A-B]", help="Lengths of prompts."
        ),
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", metavar="N|uniform:...|lognormal:...", help="Lengths of answers.")
    ] = "128",
    dataset: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--dataset", metavar="FILE", help="Prompts from JSONL or ShareGPT instead of synthetic ones."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by chat completions.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=10, help="0 is greedy.")] = 0.0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end by themselves, not at their length.")
    ] = False,
    extra_body: Annotated[
        str, typer.Option("--extra-body", metavar="JSON", help="Fields that every request gets besides.")
    ] = "{}",
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, lengths, arrivals and faults.")] = 1,
    strategy: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--strategy", metavar="kv,recompute,restart,engine", help="What is compared (default kv)."),
    ] = None,
    kills: Annotated[int, typer.Option("--kills", min=0, max=1000, help="So many SIGKILLs.")] = 0,
    kill_every: Annotated[
        float,
        typer.Option(
            "--kill-every",
            min=0,
            max=3600,
            help="Planned seconds between two kills: in the mean, and at least half of it.",
        ),
    ] = 5.0,
    faults: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--faults", metavar="FILE", help="A fault plan (YAML) instead of --kills."),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--workers", min=1, max=16, help="Engines to start (default 2)."),
    ] = None,
    controls: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--controls", min=1, max=10, help="Undisturbed passes to compare with (default 1); 2 show variance."
        ),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Most seconds for one pass.")] = 3600.0,
    silence: Annotated[
        float, typer.Option("--silence", min=1, help="Seconds without a byte after which a client gives up.")
    ] = 300.0,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results go (default: a new folder here).")
    ] = Path("."),
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> int:
    """Send load, kill workers, and say what clients saw of it.

    midstream loadtest --concurrency 8 --kills 10 --strategy kv,recompute -- vllm serve MODEL --max-model-len 2048
    """
    from ..loadtest.load import output
    from ..loadtest.load.arrivals import read_trace
    from ..loadtest.load.dataset import read_dataset
    from ..loadtest.load.fault_plan import draw_kills, read_plan
    from ..loadtest.load.lengths import parse_lengths
    from ..loadtest.load.run import LoadTest, Options
    from ..loadtest.load.workload import Shape

    plan = read_plan(faults) if faults is not None else draw_kills(kills, kill_every, seed)
    if faults is not None and kills:
        raise ConfigError("--kills and --faults: give one of them; a plan can hold kills, too")
    _require_one_place(command, url, has_faults=bool(plan.faults or plan.arena))
    if url:
        _refuse_beside_url(strategy=strategy, workers=workers, controls=controls, set=assignments or None)
    trace = () if arrivals in ("poisson", "constant") else tuple(read_trace(Path(arrivals)))
    if trace and rate is not None:
        raise ConfigError("--rate: the trace says when requests come; leave it out")
    if rate is not None and not 0 < rate <= 100_000:
        raise ConfigError(f"--rate: {rate:g} is out of range; above 0, at most 100000 a second")
    is_open_loop = rate is not None or bool(trace)
    options = Options(
        command=tuple(command or ()),
        url=url.rstrip("/"),
        shape=Shape(
            parse_lengths(prompt_tokens, "--prompt-tokens"),
            parse_lengths(output_tokens, "--output-tokens"),
            chat=chat,
            temperature=temperature,
            ignore_eos=not stop_at_eos,
            extra=_object(extra_body),
        ),
        strategies=_strategies("kv" if strategy is None else strategy),
        plan=plan,
        workers=workers or 2,
        seed=seed,
        requests=requests if requests is not None or duration is not None else (len(trace) or 100),
        duration_s=duration,
        rate=rate,
        is_poisson=arrivals == "poisson",
        trace=trace,
        entries=tuple(read_dataset(dataset)) if dataset is not None else (),
        concurrency=concurrency_max if is_open_loop else concurrency,
        controls=controls or 1,
        limit_s=limit,
        silence_s=silence,
        settings=assigned(assignments),
    )
    folder = out if out != Path(".") else Path(time.strftime("loadtest-%Y%m%d-%H%M%S"))
    output.prepare(folder)
    progress = _Progress()
    test = LoadTest(
        options,
        progress,
        progress.line,
        lambda name, entry: progress.line(
            f"{name}: fault {entry.number} {entry.kind} {entry.worker or '-'} at {entry.at_s:.1f} s: "
            + (f"{entry.decoding} decoding, {entry.prefilling} prefilling" if entry.hit else entry.detail)
        ),
    )
    is_complete = False
    try:
        run_interruptible(test.run())
        is_complete = True
    finally:
        # What is through is worth having, whatever ended the run.
        progress.close()
        if test.passed:
            summary = output.summary_of(options, test.model, test.passed, is_complete=is_complete)
            written = output.write(folder, summary, test.passed)
    if as_json:
        print(json.dumps({**summary, "out": str(folder)}))
    else:
        _show(summary, written)
    return 0 if is_good(summary) else 1


def is_good(summary: dict[str, Any]) -> bool:
    """Whether the run shows what it is to show: no answer failed, all faults hit, and no token was lost or repeated.

    A client that begins again itself, and engines without a sidecar, promise nothing of single tokens.
    """
    strategies = summary["strategies"]
    if any(told["failed"] or told["faults_missed"] for told in strategies.values()):
        return False
    kept = [told for name, told in strategies.items() if name in _KEEP_TOKENS]
    return not any(told["lost"] or told["repeated"] for told in kept)


def _require_one_place(command: list[str] | None, url: str, *, has_faults: bool) -> None:
    if bool(command) == bool(url):
        raise ConfigError("name an engine's command after --, or a running sidecar with --url (one of the two)")
    if url and has_faults:
        raise ConfigError("--url: no faults are done to what others have started; leave --kills and --faults out")
    if command:
        require_command(command)


def _refuse_beside_url(**given: object) -> None:
    """What is about engines and sidecars that are started here means nothing for one that runs already."""
    if names := [f"--{name}" for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"--url: {', '.join(names)} would change nothing at what runs already; leave that out, or give the "
            "engine's command after -- instead"
        )


def _strategies(text: str) -> Any:
    from ..loadtest.load.strategies import CHOICES, Strategy

    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in CHOICES]
    if unknown or not words:
        raise ConfigError(f"--strategy: {text!r}; give some of {', '.join(CHOICES)}, with commas between")
    return tuple(Strategy(word) for word in dict.fromkeys(words))


def _object(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise ConfigError(f"--extra-body: {text[:80]!r} is no JSON object")
    return told


def _show(summary: dict[str, Any], written: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = (
        "completed", "failed", "faults", "interrupted", "lost", "repeated", "identical", "different", "variance",
        "different_undisturbed", "p50_gap_ms", "p90_gap_ms", "p99_gap_ms", "max_gap_ms", "median_ttft_ms",
        "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms", "output_throughput", "p99_lateness_ms",
    )  # fmt: skip
    strategies = summary["strategies"]
    table = Table("", *strategies, box=None)
    for row in rows:
        table.add_row(row, *(f"{told[row]:g}" for told in strategies.values()))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for name, value in summary["comparison"].items():
        console.print(f"{name} {value}")
    console.print("\n".join(str(path) for path in written), markup=False)


class _Progress(Progress):
    """The changing line, and above it lines that stay."""

    def line(self, text: str) -> None:
        """A line that stays."""
        self.close()
        print(text, file=sys.stderr, flush=True)
