"""The front end of one session: what a token means for its stream. Pure.

Owns text, counts and endings. Pushing the same tokens again rebuilds exactly the same state, and that is how a session
is taken up: old outputs are pushed as outputs. It does not sample and does not know where tokens come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .detokenizer import Decode, Detokenizer, StopMatcher
from .protocol import SamplingParams


class Finish(StrEnum):
    """Why a stream ended, as clients and the arena read it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a sampled token, and of the likeliest ones, before any penalty or temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream delivers next. `logprobs` is None when not asked for, and for tokens of before a failover."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class Output:
    """Text and ending of one session's output tokens."""

    def __init__(
        self, params: SamplingParams, max_tokens: int, eos_ids: frozenset[int], decode: Decode, prompt: Sequence[int]
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._detokenizer = Detokenizer(decode, prompt)
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self.count = 0
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> Piece:
        """Take one output token; after a piece with `finish` there must be no other."""
        text = self._take(token)
        entries = None if logprobs is None else (logprobs,)
        return Piece((token,), text, self.finish, self.stop_reason, entries)

    def replay(self, tokens: Sequence[int]) -> Piece:
        """Take the outputs of before a failover, as one piece; it ends where one of them ended the stream."""
        texts: list[str] = []
        taken: list[int] = []
        for token in tokens:
            if self.finish is not None:
                break
            texts.append(self._take(token))
            taken.append(token)
        return Piece(tuple(taken), "".join(texts), self.finish, self.stop_reason)

    def abort(self) -> str:
        """End the stream where it is; returns the text that was held back."""
        self.finish = Finish.ABORT
        return self._matcher.pass_by(self._detokenizer.flush())

    def _take(self, token: int) -> str:
        self.count += 1
        ends_here = token in self._eos_ids or token in self._params.stop_token_ids
        if ends_here and self.count >= self._params.min_tokens:
            self.finish = Finish.STOP
            self.stop_reason = None if token in self._eos_ids else token
            shown = self._detokenizer.push(token) if self._params.include_stop_str_in_output else ""
            return self._matcher.pass_by(shown + self._detokenizer.flush())
        text = self._detokenizer.push(token)
        last = self.count >= self._max_tokens
        if last:
            text += self._detokenizer.flush()
        if self.count <= self._params.min_tokens:
            text = self._matcher.pass_by(text)
        else:
            text, stop = self._matcher.push(text)
            if stop is not None:
                self.finish, self.stop_reason = Finish.STOP, stop
                return text
        if last:
            self.finish = Finish.LENGTH
            text += self._matcher.flush()
        return text
