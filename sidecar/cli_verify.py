"""The command `verify`: compares interrupted answers with undisturbed ones, on the user's own engine and workload.

Owns the options and what they may be together. What is compared and what counts as proof is `loadtest.verify`; what it
runs on is `verify_bench.py`, what is shown `verify_screen.py`: both are imported only when the command runs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..loadtest.verify.cuts import Way
from ..loadtest.verify.prompts import MAX_TOKENS, built_in, read_prompts
from ..session.errors import ConfigError
from .cli_engines import assigned, demo_command, require_command
from .cli_options import AsJson, Assignments
from .config import default_state_dir, parse_worker
from .interruptible import run_interruptible

if TYPE_CHECKING:
    from .verify_bench import Engines


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
    engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--engine", help="In place of a command: that of the demo (transformers, vllm, sglang)."),
    ] = None,
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
    midstream verify --engine sglang

    Exit status: 0 every answer was identical and every planted fault was found; 1 a restore changed an answer, or a
    planted fault was not found, or the record does not hold; 4 nothing failed, and not everything is proven.
    """
    engines = _engines(command or [], worker or [], state_dir, assignments or [], engine)
    from ..loadtest.verify import record
    from ..loadtest.verify.html import page
    from ..loadtest.verify.plants import Fault
    from ..loadtest.verify.verification import Options
    from . import verify_bench, verify_screen

    if check_file is not None:
        told = record.read(check_file)
        return verify_screen.tell_check(run_interruptible(verify_bench.check(engines, told)), told, as_json=as_json)
    chosen = _ways(ways)
    _require_share_of_kills(kills, chosen)
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
    with verify_screen.Shown(options) as shown:
        told = run_interruptible(verify_bench.verify(engines, options, shown.tell, isolate=not prefix_cache))
    if record_file is not None:
        record.write(record.text(told), record_file)
    if html_file is not None:
        record.write(page(told), html_file)
    if as_json:
        print(json.dumps(told))
    else:
        verify_screen.show(told)
    if told["stopped"]:
        print(f"midstream: the verification stopped: {told['stopped']}", file=sys.stderr)
    return record.status(told)


def _require_share_of_kills(share: float | None, ways: Sequence[Way]) -> None:
    """A share that the ways leave no choice about is a contradiction: nobody is to believe that it was heeded."""
    if share and Way.KILL not in ways:
        raise ConfigError(f"--kills {share:g}: --ways has no kill; add it there, or leave --kills out")
    if share is not None and share < 1 and set(ways) == {Way.KILL}:
        raise ConfigError(f"--kills {share:g}: --ways has nothing but kill; add another way, or leave --kills out")


def _engines(
    command: Sequence[str],
    workers: Sequence[str],
    state_dir: str | None,
    assignments: Sequence[str],
    engine: str | None,
) -> "Engines":
    if bool(command) + bool(workers) + (engine is not None) != 1:
        raise ConfigError(
            "name what is to be verified: either the engine's command after --, or --worker URL twice or more, or "
            "--engine"
        )
    from .verify_bench import SETTINGS, Engines

    settings = {**SETTINGS, **assigned(assignments)}
    if workers:
        if len(workers) < 2:
            raise ConfigError("one worker has nobody to hand a session to; name two or more with --worker")
        beside = [f"{w.name}={w.url}" for w in map(_parsed, workers, range(len(workers)))]
        return Engines((), tuple(beside), Path(state_dir or default_state_dir()), settings)
    if state_dir is not None:
        raise ConfigError("--state-dir goes with --worker; a sidecar of verify's own has a folder of its own")
    environ: dict[str, str] = {}
    if engine is not None:
        command, environ = demo_command(engine)
    require_command(command)
    return Engines(tuple(command), (), None, settings, environ)


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
