"""Measures midstream on a GPU: `python3 -m midstream.loadtest.gpu PART [PART ...] --home HOME --out OUT`.

Owns the options and the order of the parts. Each part is one that can run alone within its share of `--limit`; a part
that fails prints why, with the ends of all logs, and the next one runs. Exit status: 0 all ran and every bar was met;
1 a bar was not met or a figure is missing; 2 a part could not run. docs/gpu.md says how to prepare the machine.
"""

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ...session.errors import MidstreamError
from . import copying, exact, gap, overhead, parking, probe
from .clock import Clock
from .kinds import KINDS, with_options
from .models import write_large
from .results import Results, table

PARTS = ("probe", "copy", "overhead", "gap", "exact", "park")
# A part that has less than this left is not begun.
LEAST_S = {"probe": 20.0, "copy": 60.0, "overhead": 240.0, "gap": 240.0, "exact": 200.0, "park": 60.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    options = _parse(arguments)
    results = Results(options.out / "figures.jsonl")
    clock = Clock(options.limit)
    could_not = False
    # A shell's background job ignores SIGINT, and would ignore with it what is turned into it here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C: what was started ends in good order.
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    for part in options.parts:
        if clock.left_s() < LEAST_S[part]:
            results.missing(part, part, f"only {clock.left_s():.0f} s of the time were left")
            continue
        print(f"=== {part}, {clock.left_s():.0f} s left", flush=True)
        try:
            _run(part, options, results, clock)
        except KeyboardInterrupt:
            could_not = True
            results.missing(part, part, "it was interrupted")
            break
        except Exception as error:
            # Whatever an engine that went away has brought with it: the parts after it may still work.
            could_not = True
            traceback.print_exc()
            results.missing(part, part, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    print("=== figures", flush=True)
    print(table(results.figures), flush=True)
    if could_not:
        return 2
    return 1 if any(f.value is None or f.met is False for f in results.figures) else 0


def _run(part: str, options: argparse.Namespace, results: Results, clock: Clock) -> None:
    folder = options.out / part
    folder.mkdir(parents=True, exist_ok=True)
    small = options.home / "smollm2"
    engine = with_options(KINDS[options.engine], options.engine_option)
    match part:
        case "probe":
            probe.measure(results)
        case "copy":
            copying.measure(folder, results, sessions=options.copy_sessions)
        case "overhead":
            large = write_large(small, options.home / "large")
            uvloop.run(
                overhead.measure(
                    large,
                    folder,
                    results,
                    clock,
                    rounds=options.rounds,
                    kind=engine,
                    variants=options.variants.split(","),
                )
            )
        case "park":
            model = write_large(small, options.home / "large") if small.is_dir() else None
            uvloop.run(parking.measure(model, folder, results, clock, words=options.park))
        case "gap":
            large = write_large(small, options.home / "large")
            wanted = gap.scenes(options.scenes)
            uvloop.run(gap.measure(large, folder, results, clock, wanted=wanted, front_ends=options.front_ends))
            gap.compare(results)
        case _:
            kinds = [exact.Kind(word) for word in options.kills.split(",")]
            uvloop.run(exact.measure(small, folder, results, clock, kinds=kinds, engine=engine))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="midstream.loadtest.gpu", description="Measures midstream on a GPU.")
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--home", type=Path, default=Path("/tmp/midstream-gpu"), help="folder with the model `smollm2`")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for figures and logs")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all parts together")
    parser.add_argument("--engine", choices=sorted(KINDS), default="vllm", help="what overhead and exact run on")
    parser.add_argument("--engine-option", action="append", default=[], help="one more word of its command; repeatable")
    parser.add_argument("--rounds", type=int, default=5, help="overhead: pairs of runs for each variant")
    names = ",".join(overhead.NAMES)
    parser.add_argument("--variants", default=names, help=f"overhead: some of {names}, in order")
    parser.add_argument("--scenes", default=gap.SCENES, help="gap: strategy:STREAMSxPROMPT_TOKENS, with commas")
    parser.add_argument("--front-ends", type=int, default=4, help="gap: processes of each engine that read requests")
    kinds = ", ".join(exact.Kind)
    parser.add_argument("--kills", default=exact.KILLS, help=f"exact: some of {kinds}, in order")
    parser.add_argument("--park", default="all", help=f"park: some of {', '.join(parking.WORDS)}, with commas")
    parser.add_argument("--copy-sessions", type=int, default=32, help="copy: sessions of 4,000 tokens at once")
    options = parser.parse_args(arguments)
    if not 1 <= options.rounds <= 100 or options.limit <= 0 or not 1 <= options.copy_sessions <= 64:
        parser.error("--rounds must be 1 to 100, --copy-sessions 1 to 64, and --limit above 0")
    if unknown := set(options.variants.split(",")) - set(overhead.NAMES):
        parser.error(f"--variants: {', '.join(sorted(unknown))}: there are {names}")
    if options.engine != "vllm" and "gap" in options.parts:
        parser.error("gap runs on vLLM alone; leave --engine out, or name other parts")
    if not set(options.park.split(",")) <= set(parking.WORDS):
        parser.error(f"--park is some of {', '.join(parking.WORDS)}")
    if not 1 <= options.front_ends <= 32:
        parser.error("--front-ends must be 1 to 32")
    try:
        gap.scenes(options.scenes)
        [exact.Kind(word) for word in options.kills.split(",")]
    except (MidstreamError, ValueError) as error:
        parser.error(str(error))
    options.home, options.out = options.home.resolve(), options.out.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
