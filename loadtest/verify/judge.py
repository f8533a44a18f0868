"""Verdicts on interrupted answers, beside controls: undisturbed runs of the same request. Pure.

Owns what counts as proof. Invariant: an answer is IDENTICAL only if the sidecar called its restore exact, the controls
agree among themselves and no reader could tell the answer from them; what differs without such controls is never
called a failure, nor a pass. It runs nothing and knows no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any

from ..client import HALF_A_CHARACTER, Answer
from ..exactness import lost_and_duplicated


class Verdict(StrEnum):
    """What one interrupted answer says about its restore."""

    IDENTICAL = "identical"  # the run that was interrupted, continued
    VARIANCE = "variance"  # it differs, and so do undisturbed runs: no proof, and no failure
    RESTORE = "restore"  # it differs or is broken, and undisturbed runs agree: a failure
    UNSETTLED = "unsettled"  # with these settings no comparison can tell
    RECOMPUTED = "recomputed"  # the sidecar said so: honest, and no proof
    REFUSED = "refused"  # the sidecar would not go on: honest, and no proof
    MISSED = "missed"  # nothing was interrupted


class Settling(StrEnum):
    """How a request chooses its tokens, and so whether two runs of it can be compared."""

    GREEDY = "greedy"
    SEEDED = "seeded"
    UNSEEDED = "unseeded"


ADVICE = {
    Settling.GREEDY: (
        "undisturbed runs differ although the request is greedy: the engine's numbers depend on what else it computes; "
        "verify one request at a time (--concurrency 1), and with vLLM set VLLM_BATCH_INVARIANT=1"
    ),
    Settling.SEEDED: (
        "undisturbed runs differ although the request has a seed: verify one request at a time (--concurrency 1), "
        "with vLLM set VLLM_BATCH_INVARIANT=1, or make the request greedy (temperature 0)"
    ),
    Settling.UNSEEDED: (
        "the request samples without a seed, so no two runs are alike: give it temperature 0, or a seed"
    ),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer, as far as two of them can be compared. `faults`: what was wrong with it, whatever it says.

    `half`: half a character came, and something after it. A model may write that undisturbed; then it is to come again.
    """

    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish: str = ""
    usage: tuple[Any, ...] = ()
    faults: tuple[str, ...] = ()
    half: bool = False

    @classmethod
    def of(cls, answer: Answer) -> "Reading":
        """What a client read."""
        faults = [violation for violation in answer.violations if violation != HALF_A_CHARACTER]
        if answer.error is not None:
            faults.append(f"error: {str(answer.error)[:300]}")
        elif not answer.sound and not faults:
            faults.append("it did not end well")
        usage = answer.usage or {}
        return cls(
            tuple(answer.token_ids),
            answer.text,
            tuple(answer.logprobs),
            answer.finish,
            (usage.get("prompt_tokens"), usage.get("completion_tokens")),
            tuple(faults),
            HALF_A_CHARACTER in answer.violations,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """How two readings differ. `first` is the first differing token (counted from 0), or None where none does.

    `share` is the part of the positions, of the longer one, at which the tokens are not the same.
    """

    what: tuple[str, ...]
    first: int | None
    share: float
    wanted: int | None
    got: int | None
    lost: int
    duplicated: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the controls are from each other; `first` is the earliest token at which two of them part."""

    runs: int
    distinct: int
    first: int | None
    share: float

    @property
    def agree(self) -> bool:
        """Whether no two of them could be told apart."""
        return self.distinct == 1


@dataclass(frozen=True, slots=True)
class Interruption:
    """What became of an interruption.

    `outcome` is the sidecar's word: exact, recomputed, restarted or refused; "" where nothing was interrupted. `had`:
    tokens that the client had before the interruption was asked for; `kept`: tokens with which the session went on.
    """

    outcome: str
    had: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, why, and how the answer differs from the control that it is nearest to."""

    verdict: Verdict
    why: str
    difference: Difference | None = None


def settling(body: Mapping[str, Any]) -> Settling:
    """How a request chooses its tokens."""
    temperature = body.get("temperature")
    if (temperature is not None and temperature < 1e-5) or body.get("top_k") == 1:
        return Settling.GREEDY
    return Settling.UNSEEDED if body.get("seed") is None else Settling.SEEDED


def difference(wanted: Reading, got: Reading) -> Difference | None:
    """How `got` differs from `wanted`; None when no reader could tell."""
    fields = ("tokens", "text", "logprobs", "finish", "usage", "half")
    what = tuple(name for name in fields if getattr(wanted, name) != getattr(got, name))
    if not what:
        return None
    length = max(len(wanted.tokens), len(got.tokens))
    unequal = [i for i in range(length) if wanted.tokens[i : i + 1] != got.tokens[i : i + 1]]
    first = unequal[0] if unequal else None
    lost, duplicated = lost_and_duplicated(wanted.tokens, got.tokens)
    return Difference(
        what,
        first,
        round(len(unequal) / length, 4) if length else 0.0,
        _at(wanted, first),
        _at(got, first),
        lost,
        duplicated,
    )


def spread(controls: Sequence[Reading]) -> Spread:
    """How far undisturbed runs are from each other."""
    found = [d for a, b in combinations(controls, 2) if (d := difference(a, b)) is not None]
    distinct: list[Reading] = []
    for control in controls:
        if all(difference(control, other) is not None for other in distinct):
            distinct.append(control)
    firsts = [d.first for d in found if d.first is not None]
    return Spread(len(controls), len(distinct), min(firsts, default=None), max((d.share for d in found), default=0.0))


def judge(controls: Sequence[Reading], answer: Reading, how: Settling, what: Interruption) -> Judgement:
    """The verdict on one interrupted answer. ValueError for fewer than two controls, or one that is not whole."""
    if len(controls) < 2 or any(control.faults for control in controls):
        raise ValueError("a verdict needs two controls or more, all of them whole")
    if what.outcome == "refused":
        return Judgement(Verdict.REFUSED, "the sidecar refused to go on")
    if answer.faults:
        # Broken is broken, whatever the tokens would have been, and whoever admits to what.
        return Judgement(Verdict.RESTORE, f"the answer is not whole: {answer.faults[0]}", _nearest(controls, answer))
    if not what.outcome:
        return Judgement(Verdict.MISSED, "the answer was through before it could be interrupted")
    apart = spread(controls)
    found = _nearest(controls, answer)
    early = found is not None and found.first is not None and found.first < what.had
    if what.outcome != "exact":
        torn = found is not None and found.first is not None and what.had <= found.first < what.kept
        if torn and apart.agree and how is not Settling.UNSEEDED:
            return Judgement(Verdict.RESTORE, "tokens from before the interruption were lost or repeated", found)
        return Judgement(Verdict.RECOMPUTED, f"the sidecar says {what.outcome}", found)
    if found is None and apart.agree:
        return Judgement(Verdict.IDENTICAL, "no reader could tell")
    if how is Settling.UNSEEDED:
        return Judgement(Verdict.UNSETTLED, ADVICE[how], found)
    if found is None:
        return Judgement(Verdict.UNSETTLED, "it equals one undisturbed run, but undisturbed runs differ", found)
    if not apart.agree:
        return Judgement(Verdict.VARIANCE, ADVICE[how], found)
    if early:
        return Judgement(Verdict.VARIANCE, "it differs where nothing had been interrupted yet; " + ADVICE[how], found)
    return Judgement(Verdict.RESTORE, "undisturbed runs agree, and this one differs", found)


def _nearest(controls: Sequence[Reading], answer: Reading) -> Difference | None:
    """The difference from the control that is most like the answer; None when it equals one."""
    found = [difference(control, answer) for control in controls]
    if None in found:
        return None
    return min((d for d in found if d is not None), key=lambda d: (d.share, -1 if d.first is None else -d.first))


def _at(reading: Reading, index: int | None) -> int | None:
    return reading.tokens[index] if index is not None and index < len(reading.tokens) else None
