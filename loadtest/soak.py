"""Many kills in a row on real engines: `python -m midstream.loadtest.soak --engine transformers --kills 30`.

Starts sidecars as users do, kills the workers of running streams, and compares each answer with the undisturbed one. It
prints one line a kill and ends with 1 if a token was lost, repeated or different. Cases come from `cases.py`, verdicts
from `exactness.py`; what a failover came to is the sidecar's own report.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ..session.errors import EngineError, MidstreamError
from ..session.ids import SessionId
from .aim import Shot, Target, kill_at, snapshot_exists, target
from .cases import Case, Request, Way, draw
from .client import Answer, read_stream
from .exactness import lost_and_duplicated
from .harness import SidecarProcess, Victim

_W = TypeVar("_W", bound=StrEnum)
BACK_S = 300.0
ANSWER_S = 600.0
# A kill for which the answer was already through is drawn again, so often for each that was asked for.
DRAWS_FOR_ONE = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is tried. Answers from disk are longer: a snapshot takes a moment."""

    streams: int
    block_tokens: int
    max_tokens: int
    max_tokens_disk: int


SETUPS = {"transformers": Setup(3, 16, 96, 480), "vllm": Setup(1, 128, 120, 200), "sglang": Setup(3, 64, 120, 200)}


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of one kill. Sums are over all streams that ran; `late`: the watched answer was through already."""

    number: int
    way: str
    victim: str
    sampling: str
    path: str
    prompt_len: int
    wanted_cut: int
    killed_at: int
    cut: int
    outcome: str
    tier: str
    lag: int
    gap_ms: float
    kv_tokens_loaded: int
    tokens_recomputed: int
    detail: str
    streams: int
    interrupted: int
    identical: bool
    lost: int
    duplicated: int
    faults: tuple[str, ...]

    @property
    def late(self) -> bool:
        """Whether nothing was interrupted that was watched."""
        return not self.outcome

    @property
    def good(self) -> bool:
        """Whether nobody could tell."""
        return self.identical and not self.lost and not self.duplicated and not self.faults

    def line(self) -> str:
        """One line of the soak's output."""
        verdict = "identical" if self.identical else "DIFFERENT"
        columns = (
            f"{self.number:4d} {self.way:<8} {self.victim:<4} {self.sampling:<9} {self.path:<11}",
            f"prompt={self.prompt_len:<4} cut={self.wanted_cut:<4} killed_at={self.killed_at:<4}",
            f"resumed_at={self.cut:<4} {self.outcome or 'late':<10} {self.tier or '-':<8} lag={self.lag:<3}",
            f"gap_ms={self.gap_ms:<7g} streams={self.interrupted}/{self.streams}",
            f"{verdict} lost={self.lost} duplicated={self.duplicated}",
        )
        return " ".join([*columns, *([f"({self.detail})"] if self.detail else []), *self.faults])


class Soak:
    """The kills of one way, on one sidecar."""

    def __init__(self, way: Way, setup: Setup, sidecar: SidecarProcess, http: aiohttp.ClientSession) -> None:
        self._way = way
        self._setup = setup
        self._sidecar = sidecar
        self._http = http
        self._model = ""
        self._undisturbed: dict[Request, Answer] = {}

    async def run(self, cases: Iterator[Case], count: int, first_number: int) -> list[Kill]:
        """Kill `count` times, a line each."""
        await self._sidecar.start(self._http)
        self._model = await self._model_name()
        done: list[Kill] = []
        hits = 0
        while hits < count and len(done) < DRAWS_FOR_ONE * count:
            kill = await self._kill(next(cases), first_number + len(done))
            print(kill.line(), flush=True)
            done.append(kill)
            hits += not kill.late
        return done

    async def _model_name(self) -> str:
        models = await self._sidecar.ask(self._http, "/v1/models")
        return str(models["data"][0]["id"])

    async def _answer(self, request: Request) -> Answer:
        async with asyncio.timeout(ANSWER_S):
            return await read_stream(self._http, self._sidecar.url + request.path, request.body(self._model))

    async def _wanted(self, request: Request) -> Answer:
        """The undisturbed answer, once."""
        if request not in self._undisturbed:
            answer = await self._answer(request)
            if not answer.whole:
                raise EngineError(f"an undisturbed answer is not whole: {answer.error or answer.violations}")
            self._undisturbed[request] = answer
        return self._undisturbed[request]

    async def _kill(self, case: Case, number: int) -> Kill:
        wanted = [await self._wanted(request) for request in case.requests]
        prompt_len = _prompt_len(wanted[0])
        beside = [i for i in range(1, len(wanted)) if _prompt_len(wanted[i]) != prompt_len]
        requests = [case.requests[i] for i in (0, *beside)]
        cut = case.cut_at(prompt_len, len(wanted[0].token_ids), self._setup.block_tokens)
        targets = await self._targets()
        known = {s["session"] for s in await self._sidecar.sessions(self._http)}
        shooting = asyncio.to_thread(
            kill_at,
            targets,
            known,
            prompt_len=prompt_len,
            outputs=cut,
            victim=case.victim,
            may_shoot=self._may_shoot,
        )
        shot, answers = await asyncio.gather(shooting, asyncio.gather(*map(self._answer, requests)))
        epoch = next(t.epoch for t in targets if t.name == shot.worker)
        await self._sidecar.wait_back(self._http, shot.worker, epoch, timeout_s=BACK_S)
        told = [s for s in await self._sidecar.sessions(self._http) if s["session"] not in known]
        undisturbed = [wanted[i] for i in (0, *beside)]
        return _verdict(number, case, prompt_len, cut, shot, list(zip(answers, undisturbed, strict=True)), told)

    def _may_shoot(self, session: SessionId) -> bool:
        return self._way is not Way.DISK or snapshot_exists(self._store, session)

    @property
    def _store(self) -> Path:
        assert self._sidecar.store is not None
        return self._sidecar.store

    async def _targets(self) -> list[Target]:
        return [target(worker, self._sidecar.state_dir) for worker in await self._sidecar.workers(self._http)]


def _prompt_len(answer: Answer) -> int:
    return int((answer.usage or {})["prompt_tokens"])


def _verdict(
    number: int,
    case: Case,
    prompt_len: int,
    cut: int,
    shot: Shot,
    pairs: Sequence[tuple[Answer, Answer]],
    told: Sequence[dict[str, Any]],
) -> Kill:
    counts = [lost_and_duplicated(wanted.token_ids, answer.token_ids) for answer, wanted in pairs]
    faults = [f"stream {i}: {fault}" for i, (answer, _) in enumerate(pairs) for fault in _faults(answer)]
    of_watched = [outcome for s in told if s["session"] == shot.session for outcome in s["outcomes"]]
    last: dict[str, Any] = of_watched[-1] if of_watched else {}
    return Kill(
        number=number,
        way=case.way.value,
        victim=case.victim.value,
        sampling=case.watched.sampling,
        path=case.watched.kind,
        prompt_len=prompt_len,
        wanted_cut=cut,
        killed_at=shot.outputs,
        cut=int(last.get("cut", 0)),
        outcome=str(last.get("outcome", "")),
        tier=str(last.get("tier", "")),
        lag=int(last.get("lag", 0)),
        # A client that had nothing yet sees no gap between tokens: then the sidecar's figure is the longer one.
        gap_ms=max(round(pairs[0][0].gap_s * 1000, 1), float(last.get("gap_ms", 0))),
        kv_tokens_loaded=int(last.get("kv_tokens_loaded", 0)),
        tokens_recomputed=int(last.get("tokens_recomputed", 0)),
        detail=str(last.get("detail", "")),
        streams=len(pairs),
        interrupted=sum(1 for s in told if s["outcomes"]),
        identical=all(answer.same_as(wanted) for answer, wanted in pairs),
        lost=sum(lost for lost, _ in counts),
        duplicated=sum(duplicated for _, duplicated in counts),
        faults=tuple(faults),
    )


def _faults(answer: Answer) -> list[str]:
    faults = list(answer.violations)
    if answer.error is not None:
        faults.append(f"error {str(answer.error)[:200]}")
    elif not answer.whole and not faults:
        faults.append("it did not end well")
    return faults


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """The totals: how many of which outcome for each way, and what went wrong."""
    hits = [kill for kill in kills if not kill.late]
    outcomes = Counter(f"{kill.way}: {kill.outcome} ({kill.tier})" for kill in hits)
    gaps = sorted(kill.gap_ms for kill in hits)
    return {
        "kills": len(hits),
        "late": len(kills) - len(hits),
        "streams_interrupted": sum(kill.interrupted for kill in kills),
        "outcomes": dict(sorted(outcomes.items())),
        "not_exact": sum(kill.outcome != "exact" for kill in hits),
        "lost": sum(kill.lost for kill in kills),
        "duplicated": sum(kill.duplicated for kill in kills),
        "different": sum(not kill.identical for kill in kills),
        "faulty": sum(bool(kill.faults) for kill in kills),
        "gap_ms_p50": gaps[len(gaps) // 2] if gaps else 0.0,
        "gap_ms_max": gaps[-1] if gaps else 0.0,
    }


async def soak(
    command: Sequence[str],
    environ: dict[str, str],
    *,
    engine: str,
    kills: int,
    seed: int,
    ways: Sequence[Way],
    victims: Sequence[Victim] = tuple(Victim),
) -> list[Kill]:
    """All kills, way by way."""
    setup = SETUPS[engine]
    done: list[Kill] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for index, way in enumerate(ways):
            share = kills // len(ways) + (index < kills % len(ways))
            if not share:
                continue
            with tempfile.TemporaryDirectory(prefix="midstream-store-") as folder:
                sidecar = _sidecar(command, environ, way, Path(folder))
                cases = draw(
                    seed,
                    way,
                    streams=setup.streams,
                    max_tokens=setup.max_tokens_disk if way is Way.DISK else setup.max_tokens,
                    victims=victims,
                )
                try:
                    done += await Soak(way, setup, sidecar, http).run(cases, share, len(done) + 1)
                except (EngineError, TimeoutError):
                    print(sidecar.last_lines(), file=sys.stderr)
                    raise
                finally:
                    await asyncio.to_thread(sidecar.stop)
    return done


def _sidecar(command: Sequence[str], environ: dict[str, str], way: Way, folder: Path) -> SidecarProcess:
    # Kills in a row are what is wanted here: none of them is to be waited for longer than the first.
    settings: dict[str, object] = {"supervise.restarts_window_s": 0.001}
    if way is Way.DISK:
        settings |= {"store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8, "restore.tiers": "disk"}
    return SidecarProcess(
        command,
        workers=1 if way is Way.IN_PLACE else 2,
        environ=environ,
        settings=settings,
        store=folder if way is Way.DISK else None,
    )


def _engine_command(engine: str, model: str) -> tuple[list[str], dict[str, str]]:
    """How a worker is started; building its environment may take minutes the first time."""
    argv = [sys.executable, "-m", "midstream.sidecar.environments", "command", engine, model]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise EngineError(f"the environment of {engine} cannot be had; see above")
    told = json.loads(done.stdout)
    return told["argv"], told["env"]


def _words(parser: argparse.ArgumentParser, option: str, text: str, known: type[_W]) -> list[_W]:
    try:
        return [known(word) for word in text.split(",")]
    except ValueError as error:
        parser.error(f"{option}: {error}; known are {', '.join(known)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no token was lost, repeated or different; 1 if one was; 2 if it could not be tried."""
    parser = argparse.ArgumentParser(prog="midstream.loadtest.soak", description="Many kills in a row on real engines.")
    parser.add_argument("--engine", choices=sorted(SETUPS), default="transformers")
    parser.add_argument("--kills", type=int, default=30, help="in all, shared between the ways")
    parser.add_argument("--seed", type=int, default=1, help="of the cases; printed, so that a run can be repeated")
    parser.add_argument("--ways", default="held,in-place,disk", help="from where sessions go on")
    parser.add_argument("--victims", default="core,root,tree", help="what of a worker is killed, each in turn")
    parser.add_argument("--model", choices=["tiny", "real"], help="default: tiny for transformers, else real")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all cases and the summary there")
    args = parser.parse_args(arguments)
    ways = _words(parser, "--ways", args.ways, Way)
    victims = _words(parser, "--victims", args.victims, Victim)
    model = args.model or ("tiny" if args.engine == "transformers" else "real")
    try:
        command, environ = _engine_command(args.engine, "tiny-model" if model == "tiny" else "model")
        print(
            f"soak engine={args.engine} model={model} kills={args.kills} seed={args.seed} ways={args.ways} "
            f"victims={args.victims}",
            flush=True,
        )
        kills = asyncio.run(
            soak(
                command, environ, engine=args.engine, kills=args.kills, seed=args.seed, ways=ways, victims=victims
            )
        )  # fmt: skip
    except (MidstreamError, TimeoutError, aiohttp.ClientError) as error:
        print(f"midstream: the soak stopped: {error or type(error).__name__}", file=sys.stderr)
        return 2
    total = summary(kills)
    for name, value in total.items():
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:<20} {shown}")
    if args.json is not None:
        report = {"engine": args.engine, "model": model, "seed": args.seed, "summary": total}
        args.json.write_text(json.dumps({**report, "cases": [asdict(kill) for kill in kills]}, indent=1) + "\n")
    return 0 if all(kill.good for kill in kills) and total["kills"] >= args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
