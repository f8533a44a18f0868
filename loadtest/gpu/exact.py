"""Interrupted answers beside undisturbed ones on a real small model: real SIGKILLs, and one fault of the GPU.

Owns the kills and the verdicts. Many different sessions die in each kill, for a start is what costs time; the engines
run in a mode (batch-invariant, deterministic) in which the company of other sessions changes no number. Two undisturbed
runs are compared first: where these differ, a difference is variance and proves nothing.
"""

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from ...session.errors import EngineError
from ..aim import snapshot_exists
from ..client import REPORT_HEADER, Answer, read_stream
from ..load.workload import CHAT, COMPLETIONS
from . import fault
from .clock import Clock
from .engines import lives
from .fleet import Fleet, fleet, kill_core
from .kinds import VLLM, EngineKind
from .models import SERVED_AS
from .results import Results

PART = "exact"
NAMES = ("a", "b")
BACK_S = 240.0
ANSWER_S = 120.0
FAULT_S = 60.0
# All that is asked in one kill, which is three runs.
KILL_S = 40.0
LOOK_S = 0.01
CUT_TOKENS = 40
# A small model is fast: answers must last until somebody has read of a token and killed, or a snapshot was stored.
TOKENS, TOKENS_DISK = 240, 1500
SNAPSHOTS_S = 2.0
UNDISTURBED, INTERRUPTED = ("first", "second"), "interrupted"
# Of a takeover, as the sidecar tells it.
EXACT, CAME_TO_NOTHING = "exact", "interrupted"
DETAIL_MAX = 200
KILLS = "kill,kill,fault,memory,memory,disk"
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
LONG = "The quick brown fox jumps over the lazy dog. " * 100


class Kind(StrEnum):
    """How an engine is lost, and from where its sessions go on."""

    KILL = "kill"
    FAULT = "fault"
    MEMORY = "memory"
    DISK = "disk"


# What the sidecar is told where its defaults will not do. Only one place is left to go on from.
SETTINGS: Mapping[Kind, dict[str, object]] = {
    Kind.MEMORY: {"restore.tiers": "memory", "tier1.bytes": 4 << 30, "tier1.tail": 1},
    Kind.DISK: {"restore.tiers": "disk", "store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8},
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request, by a name. `alone`: the next one is asked when it has begun to answer."""

    name: str
    path: str
    body: Mapping[str, Any]
    alone: bool = False


def questions(number: int, tokens: int, engine: EngineKind = VLLM) -> list[Question]:
    """What is asked in one kill: greedy and sampled, with penalties, a grammar, logprobs, and a long prompt.

    `number` makes prompts that no earlier kill has had. Each kind comes twice: two engines get them in turn, and the
    second half begins with its second one, so that each of them has every kind.
    """
    (first, long), (second, other_long) = (_questions(2 * number + half, tokens, engine) for half in (0, 1))
    asked = [*long, *reversed(other_long), *first, *second[1:], second[0]]
    return [replace(q, body={k: v for k, v in q.body.items() if k not in engine.unasked}) for q in asked]


def _questions(number: int, tokens: int, engine: EngineKind) -> tuple[list[Question], list[Question]]:
    """Short ones, and long ones: batch-invariant or not, vLLM computes a long prompt otherwise beside other prompts."""
    story = f"Write a long story, number {number}, about a dog named Max."
    most = {"max_tokens": tokens}
    # A grammar ends the answer by itself.
    rockets = {**engine.grammar("(😀|🚀|🌍){300}"), "ignore_eos": False}
    short = [
        _chat("greedy", story, **most),
        _chat("sampled", story, temperature=0.9, seed=5 + number, top_p=0.95, **most),
        _chat("top-k", story, temperature=1.1, seed=50 + number, top_k=40, min_p=0.02, **most),
        _chat("penalties", story, temperature=0.8, seed=6 + number, **PENALTIES, **most),
        _chat("penalties, greedy", story, **PENALTIES, **most),
        _chat("logit bias", story, logit_bias={"338": -5, "260": 3}, **most),
        _chat("logprobs", story, logprobs=True, top_logprobs=2, **most),
        _chat("grammar", f"Draw {number} rockets.", **rockets, **most),
        _text("text", story, **most),
        _text("text, sampled", story, temperature=0.7, seed=7 + number, **most),
    ]
    # Among all words as they are likely, undisturbed runs choose otherwise: in long contexts last bits differ.
    long = [
        _text("long prompt", f"{number}. {LONG}", temperature=0.7, top_p=0.9, seed=8 + number, **most),
        _text("long prompt, greedy", f"{number + 1000}. {LONG}", **most),
    ]
    return short, [replace(question, alone=True) for question in long]


def _chat(name: str, prompt: str, **more: Any) -> Question:
    return Question(name, CHAT, {**_COMMON, "messages": [{"role": "user", "content": prompt}], **more})


def _text(name: str, prompt: str, **more: Any) -> Question:
    return Question(name, COMPLETIONS, {**_COMMON, "prompt": prompt, **more})


_COMMON: dict[str, Any] = {"model": SERVED_AS, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one interrupted answer."""

    question: str
    kind: Kind
    verdict: str
    outcome: str = ""
    tier: str = ""
    detail: str = ""
    lag: int = 0
    cut: int = 0


def judge(wanted: Sequence[Answer], got: Answer) -> str:
    """`identical`, `different`, `variance` (the undisturbed ones differ themselves) or `broken`."""
    if not got.sound:
        return "broken"
    first = wanted[0]
    if any(not first.same_as(other) for other in wanted[1:]):
        return "variance"
    return "identical" if got.same_as(first) else "different"


def verdict_of(
    question: str, kind: Kind, wanted: Sequence[Answer], got: Answer, outcomes: Sequence[Mapping[str, Any]]
) -> Verdict | None:
    """What became of an answer of whose session the sidecar told `outcomes`; None where nothing befell it.

    Of several takeovers one that was not exact decides; those that came to nothing were followed by another. Nothing is
    told of what ran on the engine that lives, nor of what was lost before its session had a name: that one is broken.
    """
    verdict = judge(wanted, got)
    if not outcomes:
        why = str(got.error or got.violations or "no finish")[:DETAIL_MAX]
        return Verdict(question, kind, verdict, "none", "none", why) if verdict == "broken" else None
    came_to = [o for o in outcomes if o["outcome"] != CAME_TO_NOTHING] or outcomes
    told = next((o for o in reversed(came_to) if o["outcome"] != EXACT), came_to[-1])
    return Verdict(
        question, kind, verdict, str(told["outcome"]), str(told["tier"]), str(told["detail"]), int(told["lag"]),
        int(told["cut"]),
    )  # fmt: skip


def kept_free_s(starts_s: Sequence[float]) -> float:
    """How long one more kill takes, after so many starts: the longest restart, and the answers.

    The first start is cold and takes twice as long as any later one, so until there was a restart half of it is taken.
    """
    first_s, *restarts_s = starts_s
    return max(restarts_s, default=first_s / 2) + KILL_S


async def measure(
    model: Path,
    folder: Path,
    results: Results,
    clock: Clock,
    *,
    kinds: Sequence[Kind] = (Kind.KILL, Kind.FAULT),
    engine: EngineKind = VLLM,
) -> list[Verdict]:
    """One kill of each of `kinds`, in order, as far as there is time."""
    found: list[Verdict] = []
    ran: list[Kind] = []
    with tempfile.TemporaryDirectory(prefix="midstream-gpu-") as place:
        triggers = {name: Path(place) / f"fault-{name}" for name in NAMES}
        fault.dist_info(Path(place))
        async with fleet(folder) as engines:
            command = engine.serve(model, *engine.small(), *engine.exact_options)
            for name, trigger in triggers.items():
                environ = {**(engine.exact_environ or {}), fault.VARIABLE: str(trigger), "PYTHONPATH": _with(place)}
                engines.add(name, command, environ=environ, kind=engine)
            store = Path(place) / "store"
            await _front(engines, kinds[0], store)
            for one in engines.engines.values():
                one.start()
            starts_s: list[float] = []
            for number, kind in enumerate(kinds):
                if number and clock.left_s() < kept_free_s(starts_s):
                    for later, left in enumerate(kinds[number:], number + 1):
                        results.missing(PART, f"kill {later}, {left}", "the time was over")
                    break
                if number and SETTINGS.get(kind) != SETTINGS.get(kinds[number - 1]):
                    await _front(engines, kind, store)
                began_s = time.monotonic()
                await engines.ready(NAMES, timeout_s=min(clock.left_s(), BACK_S))
                starts_s.append(time.monotonic() - began_s)
                found += await _kill(engines, engine, kind, number, triggers, store, results)
                ran.append(kind)
                if number + 1 < len(kinds):
                    await _begin_again(engines, triggers)
    tell(found, ran, results)
    return found


def _with(folder: str) -> str:
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


async def _front(engines: Fleet, kind: Kind, store: Path) -> None:
    await engines.front(NAMES, settings=SETTINGS.get(kind), store=store if kind is Kind.DISK else None)


async def _kill(
    engines: Fleet,
    engine: EngineKind,
    kind: Kind,
    number: int,
    triggers: Mapping[str, Path],
    store: Path,
    results: Results,
) -> list[Verdict]:
    assert engines.sidecar is not None
    sidecar = engines.sidecar
    timeout = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        asked = questions(number, TOKENS_DISK if kind is Kind.DISK else TOKENS, engine)
        undisturbed = [await _all(http, sidecar.url, asked, run) for run in UNDISTURBED]
        for question, answer in zip(asked, undisturbed[0], strict=True):
            if not answer.sound:
                raise EngineError(f"{question.name}: undisturbed, and not whole: {answer.error or answer.violations}")
        known = {s["session"] for s in await sidecar.sessions(http)}
        killing: list[asyncio.Task[None]] = []

        begun: set[int] = set()
        waiting = sum(not question.alone for question in asked)

        def at_cut(answer: Answer) -> None:
            begun.add(id(answer))
            # An engine that has just started may be late with all of its answers.
            if not killing and len(answer.token_ids) >= CUT_TOKENS and len(begun) == waiting:
                killing.append(asyncio.create_task(_lose(engines, kind, triggers, store, known, http)))

        got = await _all(http, sidecar.url, asked, INTERRUPTED, at_cut)
        if not killing:
            raise EngineError(f"kill {number + 1}: no answer came to token {CUT_TOKENS}")
        await killing[0]
        told = {str(s["session"]): s for s in await sidecar.sessions(http) if s["session"] not in known}
    verdicts = []
    for index, (question, answer) in enumerate(zip(asked, got, strict=True)):
        outcomes = told.get(answer.session, {}).get("outcomes") or []
        verdict = verdict_of(question.name, kind, [run[index] for run in undisturbed], answer, outcomes)
        if verdict is not None:
            verdicts.append(verdict)
            print(f"{kind} {number + 1}: {verdict}", flush=True)
    results.add(PART, f"kill {number + 1} by {kind}", len(verdicts), "interruptions", **_counts(verdicts))
    return verdicts


async def _begin_again(engines: Fleet, triggers: Mapping[str, Path]) -> None:
    """Start whatever was lost anew, and do not wait until it is ready."""
    for name in NAMES:
        if (await engines.worker(name))["state"] != "ready":
            await asyncio.to_thread(triggers[name].unlink, missing_ok=True)
            await engines.begin_again(name)


async def _all(
    http: aiohttp.ClientSession, url: str, asked: Sequence[Question], run: str, on_tokens: Any = None
) -> list[Answer]:
    """All of them, in order and nearly at once; `on_tokens` is told of those that do not come first.

    None finds blocks of another run or question: a prompt of which a part is there already is rounded otherwise.
    """
    answers: dict[int, asyncio.Task[Answer]] = {}

    def ask(index: int, question: Question) -> asyncio.Event:
        begun = asyncio.Event()

        def at_tokens(answer: Answer) -> None:
            begun.set()
            if on_tokens is not None and not question.alone:
                on_tokens(answer)

        body = {**question.body, "cache_salt": f"{run}, {question.name}"}
        reading = read_stream(http, url + question.path, body, headers={REPORT_HEADER: "1"}, on_tokens=at_tokens)
        answers[index] = task = asyncio.create_task(reading)
        task.add_done_callback(lambda _: begun.set())
        return begun

    for index, question in enumerate(asked):
        begun = ask(index, question)
        if question.alone:
            await begun.wait()
    return [await answers[index] for index in range(len(asked))]


async def _lose(
    engines: Fleet, kind: Kind, triggers: Mapping[str, Path], store: Path, known: set[Any], http: aiohttp.ClientSession
) -> None:
    """Take the engine with the most sessions away; with snapshots, once each session has one."""
    assert engines.sidecar is not None
    workers = await engines.sidecar.workers(http)
    victim = max(workers, key=lambda worker: int(worker["sessions"]))["name"]
    if kind is Kind.DISK:
        deadline_s = time.monotonic() + SNAPSHOTS_S
        while time.monotonic() < deadline_s:
            new = [s["session"] for s in await engines.sidecar.sessions(http) if s["session"] not in known]
            if all(snapshot_exists(store, session) for session in new):
                break
            await asyncio.sleep(LOOK_S)
    engine = engines.engines[victim]
    if kind is not Kind.FAULT:
        kill_core(engine)
        return
    core = engine.core()
    await asyncio.to_thread(triggers[victim].touch)
    deadline_s = time.monotonic() + FAULT_S
    while lives(core):
        if time.monotonic() > deadline_s:
            raise EngineError(f"engine {victim} lives on, {FAULT_S:g} s after a fault of its GPU")
        await asyncio.sleep(LOOK_S)


def _counts(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "verdicts": dict(sorted(Counter(v.verdict for v in verdicts).items())),
        "outcomes": dict(sorted(Counter(f"{v.outcome} ({v.tier})" for v in verdicts).items())),
        "details": dict(sorted(Counter(v.detail for v in verdicts if v.detail).items())),
    }


def tell(found: Sequence[Verdict], ran: Sequence[Kind], results: Results) -> None:
    """The totals, for each way in which engines were lost: those that `ran`, whether or not sessions were found."""
    if not ran:
        results.missing(PART, "identical", "no engine was lost")
    for kind in dict.fromkeys(ran):
        mine = [v for v in found if v.kind is kind]
        if not mine:
            results.missing(PART, f"{kind}: identical", "no session was interrupted")
            continue
        identical = sum(v.verdict == "identical" and v.outcome == EXACT for v in mine)
        results.add(
            PART, f"{kind}: identical", identical, "sessions", bar=len(mine), at_least=True, **_counts(mine)
        )  # fmt: skip
