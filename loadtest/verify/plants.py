"""Plants faults in a sidecar of verify's own, and sees whether the judge finds them: a verdict machine must be able to
fail.

Owns the three faults: one flipped bit of KV, a cut that claims one token more than its KV has, and an answer that goes
on without the history of its penalties. Invariant: a plant counts as found only if the judge calls it a failure of the
restore, beside controls of the same prompt that agree; a fault that changed no token, or that the sidecar noticed
itself, is planted again elsewhere. Prompts are of one use (each has a word that no other request has), so that wrong KV
can get into no other answer.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from ...session.errors import Refused, StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from .doctored import DoctoredStore, with_shifted_cut
from .judge import Interruption, Reading, Settling, Verdict, judge, spread
from .prompts import COMPLETIONS, Prompt
from .runs import Run, Runner

ATTEMPTS_MAX = 12
# Length of an answer with a fault in it. A fast engine needs a long one, to be still writing when its snapshot is
# there; a slow one would only take longer for it.
TOKENS_FAST, TOKENS_SLOW = 96, 48
SLOW_S_PER_TOKEN = 0.02
# After this part of the answer: a fault needs room to show.
CUT_SHARE = 4
# A prompt for a shifted cut ends so many positions before a block does, so that the next block begins early.
BEFORE_EDGE = 6

_TEXTS = (
    "The expedition left the harbour before dawn. On board were eleven sailors, a cook who had never seen the sea, two "
    "goats, and a chest that nobody was allowed to open. The captain wrote everything down: the wind, the water, what "
    "was eaten and what was said. On the third day he wrote a sentence that he struck out again. It read:",
    "In the archive of the old observatory there is a notebook with the measurements of forty years. Each page has a "
    "date, a temperature, the state of the sky, and a remark. Most remarks are short. The longest of them, written in "
    "a night in March, fills three pages and begins with the words:",
    "Here is the recipe as my grandmother told it to me, with all that she left out and that I had to find out by "
    "myself: the flour must be old, the butter cold, the oven hotter than you dare, the apples sour. First you take",
    "The committee met on Tuesday to decide about the bridge. The engineer spoke of steel, the mayor of money, the "
    "farmer of his cows, and the teacher of the children who had to cross the river every day. In the end they all "
    "agreed on one thing only, namely that",
)
_PENALTIES = {"presence_penalty": 1.4, "frequency_penalty": 1.2}


class Fault(StrEnum):
    """What is planted."""

    FLIPPED_BIT = "flipped-bit"
    SHIFTED_CUT = "shifted-cut"
    DROPPED_PENALTIES = "dropped-penalties"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One planting. `verdict`: what the judge said, or why nothing could be judged."""

    where: str
    outcome: str
    verdict: str
    first: int | None = None


@dataclass(frozen=True, slots=True)
class Planted:
    """What became of a fault."""

    fault: Fault
    found: bool
    attempts: tuple[Attempt, ...]


class Planter:
    """Plants faults through one runner."""

    def __init__(self, runner: Runner, store: Path, block_tokens: int, seed: int) -> None:
        self._runner = runner
        self._block_tokens = block_tokens
        self._store = DoctoredStore(store)
        self._chance = Random(f"{seed}/plants")
        self._tokens = 0

    async def plant(self, fault: Fault, told: Callable[[Attempt], None] = lambda attempt: None) -> Planted:
        """Plant until it is found, at most ATTEMPTS_MAX times."""
        self._tokens = self._tokens or await self._length()
        attempts: list[Attempt] = []
        while len(attempts) < ATTEMPTS_MAX:
            attempt = await self._attempt(fault, len(attempts))
            attempts.append(attempt)
            told(attempt)
            if attempt.verdict == Verdict.RESTORE:
                return Planted(fault, True, tuple(attempts))
        return Planted(fault, False, tuple(attempts))

    async def _length(self) -> int:
        """How long answers are to be, by the engine's pace."""
        prompt = Prompt("pace", COMPLETIONS, {"prompt": "Once", "temperature": 0, "max_tokens": 9, "min_tokens": 9})
        answer = await self._runner.answer(prompt)
        times = answer.arrivals_s
        if len(times) < 2:
            return TOKENS_FAST
        pace_s = (times[-1] - times[0]) / (len(times) - 1)
        return TOKENS_SLOW if pace_s > SLOW_S_PER_TOKEN else TOKENS_FAST

    async def _attempt(self, fault: Fault, number: int) -> Attempt:
        prompt = self._prompt(fault, number)
        try:
            if fault is not Fault.FLIPPED_BIT:
                prompt = await self._as_ids(prompt, fault)
            controls = [await self._runner.undisturbed(prompt) for _ in range(2)]
            if faults := [fault for control in controls for fault in control.faults]:
                return Attempt(prompt.name, "", f"a control is not whole: {faults[0]}")
            if not spread(controls).agree or len(controls[0].tokens) < self._tokens // 2:
                return Attempt(prompt.name, "", "undisturbed runs differ, or are too short")
            match fault:
                case Fault.FLIPPED_BIT:
                    where, run = await self._flipped(prompt, controls[0])
                case Fault.SHIFTED_CUT:
                    where, run = await self._shifted(prompt, controls[0], number)
                case Fault.DROPPED_PENALTIES:
                    where, run = await self._without_penalties(prompt, controls[0])
        except (Refused, StoreError, ValueError) as error:
            return Attempt(prompt.name, "", f"not planted: {error}")
        return _judged(controls, where, run)

    def _prompt(self, fault: Fault, number: int) -> Prompt:
        word = "".join(self._chance.choice("bcdfghklmnprstvz") + self._chance.choice("aeiou") for _ in range(5))
        text = f"{word.capitalize()}. {_TEXTS[number % len(_TEXTS)]}"
        more = _PENALTIES if fault is Fault.DROPPED_PENALTIES else {}
        body = {"prompt": text, "temperature": 0, "max_tokens": self._tokens, "min_tokens": self._tokens, **more}
        return Prompt(f"{fault.value} {number + 1} ({word})", COMPLETIONS, body)

    async def _as_ids(self, prompt: Prompt, fault: Fault) -> Prompt:
        """The same prompt as token ids; for a shifted cut of a length that a block ends soon after."""
        body = {**prompt.body, "max_tokens": 1, "min_tokens": 1}
        answer = await self._runner.answer(Prompt(prompt.name, prompt.path, body))
        ids = answer.prompt_token_ids
        if not ids:
            raise Refused("prompt_ids", "the engine does not tell the ids of a prompt (return_token_ids)")
        if fault is Fault.SHIFTED_CUT:
            block = self._block_tokens
            wanted = max(len(ids) // block, 1) * block - BEFORE_EDGE
            # The word that makes it one of a kind is at the front, and stays there.
            ids = [*ids[: wanted // 2], *ids[len(ids) - (wanted - wanted // 2) :]]
            ids += ids[: wanted - len(ids)]
        return Prompt(prompt.name, prompt.path, {**prompt.body, "prompt": list(ids)})

    async def _flipped(self, prompt: Prompt, control: Reading) -> tuple[str, Run]:
        good = await self._snapshot(prompt, control, 1)
        wrong, spot = await asyncio.to_thread(self._store.with_flipped_bit, good, self._chance)
        # A little before the snapshot's end: then nothing has to be regenerated, and the sidecar cannot notice.
        run = await self._restored_from(prompt, wrong, max(len(wrong.outputs) - 3, 1))
        return f"{prompt.name}: byte {spot.byte} of block {spot.block}, cut at {run.journal}", run

    async def _shifted(self, prompt: Prompt, control: Reading, number: int) -> tuple[str, Run]:
        good = await self._snapshot(prompt, control, BEFORE_EDGE + 4)
        wrong = with_shifted_cut(good, number)
        run = await self._restored_from(prompt, wrong, len(wrong.outputs))
        return f"{prompt.name}: KV of {wrong.kv_len - 1} positions called {wrong.kv_len}, cut at {run.journal}", run

    async def _without_penalties(self, prompt: Prompt, control: Reading) -> tuple[str, Run]:
        """As a sidecar would go on that re-enters old outputs as prompt: penalties count outputs alone."""
        cut = len(control.tokens) // CUT_SHARE
        rest = {**prompt.body, "prompt": [*prompt.body["prompt"], *control.tokens[:cut]]}
        rest |= {"max_tokens": self._tokens - cut, "min_tokens": self._tokens - cut}
        answer = await self._runner.answer(Prompt(prompt.name, prompt.path, rest))
        after = Reading.of(answer)
        joined = Reading(
            (*control.tokens[:cut], *after.tokens), finish=after.finish, usage=control.usage, faults=after.faults
        )
        run = Run(joined, "", "exact", journal=cut, kept=cut, had=cut)
        return f"{prompt.name}: outputs re-entered as prompt, cut at {cut}", run

    async def _snapshot(self, prompt: Prompt, control: Reading, when: int) -> Manifest:
        """A right snapshot of this very answer, taken after `when` tokens of a session that is not disturbed."""
        taken: list[SessionId] = []

        async def take(session: SessionId) -> int:
            taken.append(session)
            await self._runner.snapshot(session)
            return 0

        run = await self._runner.with_order(prompt, when, take)
        if run.detail or not taken:
            raise StoreError(f"the answer ended before it was stored: {run.detail}")
        found = await asyncio.to_thread(self._store.latest, taken[0])
        count = len(found.outputs)
        if found.outputs != control.tokens[:count] or count > len(control.tokens) - self._tokens // 4:
            raise StoreError(f"a snapshot of {count} outputs leaves no room for a difference, or is of another answer")
        return found

    async def _restored_from(self, prompt: Prompt, wrong: Manifest, at: int) -> Run:
        async def order(session: SessionId) -> int:
            await asyncio.to_thread(self._store.publish, wrong, session)
            return await self._runner.control.move(session, tier="disk", at=at)

        return await self._runner.with_order(prompt, 1, order)


def _judged(controls: Sequence[Reading], where: str, run: Run) -> Attempt:
    reading = run.reading
    if not run.session:
        # Joined from two answers: text and counts are not of one piece, the tokens decide.
        controls = [Reading(c.tokens, finish=c.finish, usage=c.usage) for c in controls]
    told = judge(controls, reading, Settling.GREEDY, Interruption(run.outcome, 0, run.kept))
    first = told.difference.first if told.difference is not None else None
    return Attempt(where, run.outcome, told.verdict.value, first)
