"""A request while it runs: what was sent, and what its client has of the answer.

Owns the client's side of the story; the injector of faults looks at it, and `records.py` judges it when it is over.
Invariant: `tokens` is what an application would have been given, in order, whatever it took to get it.
"""

from dataclasses import dataclass, field
from typing import Any

from ..client import Answer
from .workload import Ask


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which tokens came, and how many there were by then."""

    at_s: float
    count: int


@dataclass(slots=True)
class Live:
    """One request. Times are seconds of one clock; `planned_s` is when it was due."""

    ask: Ask
    round: int
    planned_s: float
    sent_s: float = 0.0
    ended_s: float | None = None
    session: str = ""
    tokens: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    # How often a client had to send it again, and when it learned of that.
    broken_s: list[float] = field(default_factory=list)
    changed_prefix: bool = False
    answer: Answer = field(default_factory=Answer)

    @property
    def is_decoding(self) -> bool:
        """Whether tokens come, and more are expected."""
        return self.ended_s is None and 0 < len(self.tokens) < self.ask.output_tokens

    @property
    def left(self) -> int:
        """How many tokens it may still bring."""
        return self.ask.output_tokens - len(self.tokens)

    def take(self, answer: Answer, at_s: float) -> None:
        """Tokens came. Of an answer that was begun again, what the client has already is dropped."""
        had = len(self.tokens)
        if len(answer.token_ids) <= had:
            return
        if answer.token_ids[:had] != self.tokens:
            self.changed_prefix = True
        self.tokens += answer.token_ids[had:]
        self.marks.append(Mark(at_s, len(self.tokens)))

    @property
    def violations(self) -> list[str]:
        """What was wrong with the answer, in words: a reader's rules first, then what counts tell."""
        found = list(self.answer.violations)
        answer = self.answer
        if answer.error is not None:
            return found
        usage: dict[str, Any] = answer.usage or {}
        if not found and not answer.done:
            found.append("the answer did not end")
        if answer.done and not answer.finish:
            found.append("no finish reason")
        if answer.done and answer.usage is None:
            found.append("no usage")
        if answer.finish == "length" and usage.get("completion_tokens") != self.ask.output_tokens:
            found.append(f"finish 'length' at {usage.get('completion_tokens')} of {self.ask.output_tokens} tokens")
        return found
