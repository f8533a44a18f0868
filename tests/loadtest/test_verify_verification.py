"""The order of a verification, on engines that are scripts: what is run, what is tried again, what is believed."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from midstream.loadtest.verify.cuts import Way
from midstream.loadtest.verify.judge import Reading, Settling, Verdict
from midstream.loadtest.verify.plants import Attempt, Fault, Planted, Planter
from midstream.loadtest.verify.prompts import COMPLETIONS, Prompt
from midstream.loadtest.verify.record import Status, status, totals
from midstream.loadtest.verify.runs import Run, Runner, least_exact
from midstream.loadtest.verify.verification import (
    INTERRUPTED,
    Begun,
    Case,
    Controlled,
    Event,
    Options,
    Verification,
    advice,
)
from midstream.session.disk_store import DiskStore
from midstream.session.errors import EngineError

TOKENS = tuple(range(1, 21))


def answer(tokens: tuple[int, ...] = TOKENS) -> Reading:
    return Reading(tokens, "text", (), "length", (7, len(tokens)))


def prompts(count: int, **more: Any) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"p{i}", COMPLETIONS, {"prompt": f"{i}", "temperature": 0, **more}) for i in range(count))


@dataclass
class ScriptedRunner:
    """Answers as it is told to, and keeps what was asked of it."""

    undisturbed_as: Callable[[Prompt, int], Reading] = lambda prompt, number: answer()
    interrupted_as: Callable[[Prompt, Way, int, int], Run] | None = None
    controls: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, Way, int]] = field(default_factory=list)
    running: int = 0
    together: int = 0

    async def undisturbed(self, prompt: Prompt) -> Reading:
        self.controls[prompt.name] += 1
        return self.undisturbed_as(prompt, self.controls[prompt.name])

    async def interrupted(self, prompt: Prompt, way: Way, at: int, *, lag: int, prompt_len: int) -> Run:
        assert prompt_len == 7
        assert 0 <= lag <= 16
        self.asked.append((prompt.name, way, at))
        number = len([1 for name, *_ in self.asked if name == prompt.name])
        if self.interrupted_as is not None:
            return self.interrupted_as(prompt, way, at, number)
        return exact(at)

    async def top_logprobs(self, prompt: Prompt, index: int) -> list[tuple[str, float]]:
        return [(" dog", -0.5), (" cat", -0.6)]

    def log_of(self, session: str) -> tuple[str, ...]:
        return (f"log of {session}",)


def exact(at: int, **changes: Any) -> Run:
    return replace(Run(answer(), "a" * 32, "exact", "held", journal=at, kept=at, gap_ms=10.0 * at), **changes)


def verification(
    tmp_path: Path, runner: ScriptedRunner, options: Options, told: list[Event] | None = None
) -> Verification:
    DiskStore(tmp_path / "store").close()
    events: list[Event] = told if told is not None else []
    return Verification(cast(Runner, runner), tmp_path / "store", 16, options, events.append)


async def test_every_prompt_has_its_controls_before_its_cases_and_kills_come_last(tmp_path: Path) -> None:
    told: list[Event] = []
    runner = ScriptedRunner()
    options = Options(prompts(5), kill_share=0.2, faults=())
    found = await verification(tmp_path, runner, options, told).run()
    assert runner.controls == {f"p{i}": 2 for i in range(5)}
    assert [way for _, way, _ in runner.asked[-4:]] == [Way.KILL] * 4
    assert Counter(way for _, way, _ in runner.asked)[Way.KILL] == 4
    assert [c.judgement.verdict for c in found.cases] == [Verdict.IDENTICAL] * 20
    assert [(c.task.prompt, c.task.column) for c in found.cases[:4]] == [
        (0, "first"), (0, "early"), (0, "middle"), (0, "last-1"),
    ]  # fmt: skip
    assert [e.part for e in told if isinstance(e, Begun)] == ["undisturbed and moved", "killed"]
    assert sum(isinstance(e, Case) for e in told) == 20
    assert status(totals(found, options)) is Status.OPEN  # for nothing was planted


async def test_a_difference_is_believed_only_after_more_controls_agree(tmp_path: Path) -> None:
    wrong = answer((*TOKENS[:9], 99, *TOKENS[10:]))
    runner = ScriptedRunner(interrupted_as=lambda prompt, way, at, number: exact(at, reading=wrong))
    options = Options(prompts(1), cuts=1, ways=(Way.MOVE,), faults=())
    found = await verification(tmp_path, runner, options).run()
    [case] = found.cases
    assert runner.controls["p0"] == 4
    assert case.judgement.verdict is Verdict.RESTORE
    assert case.judgement.difference is not None
    assert case.judgement.difference.first == 9
    assert case.top == ((" dog", -0.5), (" cat", -0.6))
    assert case.log == (f"log of {'a' * 32}",)
    assert status(totals(found, options)) is Status.FAILED


async def test_where_more_controls_differ_it_is_variance_and_what_passed_before_is_judged_again(tmp_path: Path) -> None:
    other = answer((*TOKENS[:15], 98, *TOKENS[16:]))
    wrong = answer((*TOKENS[:9], 99, *TOKENS[10:]))
    runner = ScriptedRunner(
        undisturbed_as=lambda prompt, number: answer() if number <= 2 else other,
        interrupted_as=lambda prompt, way, at, number: exact(at, reading=answer() if number == 1 else wrong),
    )
    options = Options(prompts(1), cuts=2, ways=(Way.MOVE,), faults=())
    found = await verification(tmp_path, runner, options).run()
    assert [c.judgement.verdict for c in found.cases] == [Verdict.UNSETTLED, Verdict.VARIANCE]
    assert advice(found)
    assert "VLLM_BATCH_INVARIANT" in advice(found)[0]
    assert status(totals(found, options)) is Status.OPEN


async def test_a_cut_that_comes_too_late_is_made_earlier(tmp_path: Path) -> None:
    def late(prompt: Prompt, way: Way, at: int, number: int) -> Run:
        if number == 1:
            return exact(0, outcome="")
        if number == 2:
            return exact(at, outcome="recomputed", detail="finished")
        return exact(at)

    runner = ScriptedRunner(interrupted_as=late)
    found = await verification(tmp_path, runner, Options(prompts(1), cuts=1, ways=(Way.MOVE,), faults=())).run()
    [case] = found.cases
    assert (case.judgement.verdict, case.tries) == (Verdict.IDENTICAL, 3)
    first, second, third = (at for _, _, at in runner.asked)
    assert first > second >= third >= 1
    assert case.at == third


async def test_what_is_never_in_time_is_missed_and_no_pass(tmp_path: Path) -> None:
    runner = ScriptedRunner(interrupted_as=lambda prompt, way, at, number: exact(0, outcome=""))
    options = Options(prompts(1), cuts=2, ways=(Way.MOVE, Way.KILL), kill_share=0.5, faults=())
    found = await verification(tmp_path, runner, options).run()
    assert {c.judgement.verdict for c in found.cases} == {Verdict.MISSED}
    assert Counter(way for _, way, _ in runner.asked) == {Way.MOVE: 8, Way.KILL: 3}
    assert totals(found, options)["missed"] == 2


async def test_what_was_recomputed_for_any_other_reason_is_not_tried_again(tmp_path: Path) -> None:
    runner = ScriptedRunner(
        interrupted_as=lambda prompt, way, at, number: exact(at, outcome="recomputed", detail="checksum")
    )
    options = Options(prompts(1), cuts=1, ways=(Way.MOVE,), faults=())
    found = await verification(tmp_path, runner, options).run()
    assert [(c.judgement.verdict, c.tries) for c in found.cases] == [(Verdict.RECOMPUTED, 1)]


async def test_a_prompt_that_the_engine_refuses_runs_without_what_may_be_left_out(tmp_path: Path) -> None:
    refused = Reading((), faults=("error: response_format",))
    runner = ScriptedRunner(
        undisturbed_as=lambda prompt, number: refused if "response_format" in prompt.body else answer()
    )
    [prompt] = prompts(1, response_format={"type": "json_object"})
    options = Options((replace(prompt, optional=("response_format",)),), cuts=1, ways=(Way.MOVE,), faults=())
    found = await verification(tmp_path, runner, options).run()
    [controlled] = found.controlled
    assert controlled.left_out == ("response_format",)
    assert "response_format" not in controlled.prompt.body
    assert [c.judgement.verdict for c in found.cases] == [Verdict.IDENTICAL]


async def test_a_prompt_without_an_undisturbed_answer_is_counted_and_cuts_nothing(tmp_path: Path) -> None:
    runner = ScriptedRunner(undisturbed_as=lambda prompt, number: Reading((), faults=("error: 400",)))
    options = Options(prompts(2), faults=())
    found = await verification(tmp_path, runner, options).run()
    assert (found.cases, runner.asked) == ([], [])
    assert [c.error for c in found.controlled] == ["error: 400"] * 2
    counted = totals(found, options)
    assert (counted["unanswered_prompts"], status(counted)) == (2, Status.OPEN)


async def test_prompts_run_at_a_time_as_many_as_are_asked_for(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    told: list[Event] = []
    options = Options(prompts(9), cuts=2, ways=(Way.MOVE,), concurrency=4, faults=())
    found = await verification(tmp_path, runner, options, told).run()
    assert len(found.cases) == 18
    assert [c.prompt.name for c in found.controlled] == [f"p{i}" for i in range(9)]
    assert {e.prompt.name for e in told if isinstance(e, Controlled)} == {f"p{i}" for i in range(9)}


async def test_faults_are_planted_after_everything_else_and_one_that_is_not_found_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def attempt(self: Planter, fault: Fault, number: int) -> Attempt:
        order.append(fault.value)
        found = fault is not Fault.SHIFTED_CUT and number == 2
        return Attempt("here", "exact", "restore" if found else "identical")

    async def length(self: Planter) -> int:
        return 48

    monkeypatch.setattr(Planter, "_attempt", attempt)
    monkeypatch.setattr(Planter, "_length", length)
    told: list[Event] = []
    runner = ScriptedRunner()
    options = Options(prompts(1), cuts=1, ways=(Way.MOVE,))
    found = await verification(tmp_path, runner, options, told).run()
    assert isinstance(told[-1], Planted)
    assert Counter(order) == {"flipped-bit": 3, "shifted-cut": 12, "dropped-penalties": 3}
    assert [p.found for p in found.planted] == [True, False, True]
    counted = totals(found, options)
    assert (counted["mismatches_planted"], counted["mismatches_planted_found"]) == (3, 2)
    assert (counted["restore_differences"], status(counted)) == (0, Status.FAILED)


def test_a_prompt_is_settled_as_its_settings_say() -> None:
    assert Controlled(prompts(1)[0], Settling.GREEDY, (answer(), answer(TOKENS[:9]))).length == 9


@pytest.mark.parametrize(
    ("outcomes", "ended_well", "wanted"),
    [
        ([], True, ""),
        (["exact"], True, "exact"),
        (["interrupted", "exact"], True, "exact"),
        (["exact", "recomputed"], True, "recomputed"),
        (["restarted", "exact"], True, "restarted"),
        ([""], True, ""),
        (["exact", "refused"], False, "refused"),
        (["interrupted"], False, "refused"),
    ],
)
def test_the_least_exact_takeover_decides_what_an_answer_is_worth(
    outcomes: list[str], ended_well: bool, wanted: str
) -> None:
    told = least_exact([{"outcome": outcome} for outcome in outcomes], ended_well=ended_well)
    assert told.get("outcome", "") == wanted


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_engine_that_goes_away_ends_a_verification_and_loses_nothing_of_it(
    tmp_path: Path, concurrency: int
) -> None:
    def gone(prompt: Prompt, way: Way, at: int, number: int) -> Run:
        if prompt.name == "p2":
            raise EngineError("the sidecar has ended")
        return exact(at)

    options = Options(prompts(4), cuts=2, ways=(Way.MOVE,), concurrency=concurrency)
    found = await verification(tmp_path, ScriptedRunner(interrupted_as=gone), options).run()
    assert found.stopped == "the sidecar has ended"
    assert found.planted == []
    assert len([c for c in found.cases if c.prompt in ("p0", "p1")]) >= (4 if concurrency == 1 else 0)
    assert all(c.judgement.verdict is Verdict.IDENTICAL for c in found.cases)
    assert status({**totals(found, options), "stopped": found.stopped}) is Status.STOPPED


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_interrupted_verification_loses_nothing_of_what_was_found(tmp_path: Path, concurrency: int) -> None:
    hanging = asyncio.Event()

    class Hangs(ScriptedRunner):
        async def interrupted(self, prompt: Prompt, way: Way, at: int, *, lag: int, prompt_len: int) -> Run:
            if prompt.name == "p3":
                hanging.set()
                await asyncio.Event().wait()
            return await super().interrupted(prompt, way, at, lag=lag, prompt_len=prompt_len)

    options = Options(prompts(4), cuts=2, ways=(Way.MOVE,), concurrency=concurrency)
    running = asyncio.ensure_future(verification(tmp_path, Hangs(), options).run())
    await hanging.wait()
    running.cancel()
    found = await running
    assert found.stopped == INTERRUPTED
    assert len(found.cases) == 6
    assert found.planted == []
    assert status({**totals(found, options), "stopped": found.stopped}) is Status.STOPPED
