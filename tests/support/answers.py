"""What a scripted engine says: token ids with bytes, turned into text the way engines do it.

Owns the text rules (incomplete characters wait, text that could begin a stop string is held back, a stop string ends
the answer) and the chunks in vLLM's own form. Two engines with the same answer say the same, wherever either begins.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: one id and some bytes for each token, and how it ends."""

    pieces: tuple[bytes, ...]
    finish: str = "length"
    first_id: int = 1000
    prompt_ids: tuple[int, ...] = (5, 6, 7)

    @classmethod
    def words(cls, count: int, finish: str = "length") -> "Answer":
        """`count` tokens, each a different word."""
        return cls(tuple(f" w{i}".encode() for i in range(count)), finish)

    @property
    def ids(self) -> tuple[int, ...]:
        """The answer's token ids."""
        return tuple(range(self.first_id, self.first_id + len(self.pieces)))

    def text(self, stops: Sequence[str] = ()) -> str:
        """The text of the whole answer."""
        return self.visible(len(self.pieces), stops, finished=True)

    def visible(self, count: int, stops: Sequence[str] = (), *, finished: bool = False) -> str:
        """The text that an engine has let out after `count` tokens."""
        raw = b"".join(self.pieces[:count])
        text = raw.decode("utf-8", "ignore" if _is_cut(raw) else "strict")
        for stop in stops:
            if stop in text:
                return text[: text.index(stop)]
        if stops and not finished:
            text = text[: max(0, len(text) - max(len(stop) for stop in stops) + 1)]
        return text

    def length(self, stops: Sequence[str] = ()) -> int:
        """How many tokens the answer has, given stop strings."""
        for count in range(1, len(self.pieces) + 1):
            text = b"".join(self.pieces[:count]).decode("utf-8", "ignore")
            if any(stop in text for stop in stops):
                return count
        return len(self.pieces)


def _is_cut(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.end == len(raw)
    return False


@dataclass(frozen=True, slots=True)
class Voice:
    """How one engine's chunks look for one request."""

    answer: Answer
    chat: bool
    wants_ids: bool
    wants_usage: bool = False
    stops: tuple[str, ...] = ()
    id: str = "cmpl-1"
    created: int = 1700000000
    model: str = "tiny"

    def role(self) -> bytes:
        """The first chunk of a chat; completions have none."""
        chunk = self._head([{"index": 0, "delta": {"role": "assistant", "content": ""}} | _NO_END])
        chunk["prompt_token_ids"] = list(self.answer.prompt_ids) if self.wants_ids else None
        chunk["prompt_text"] = None
        return _event(chunk)

    def tokens(self, start: int, end: int, *, first: bool, finish: str | None = None) -> bytes:
        """The chunk that delivers tokens `start` to `end` (not included)."""
        was = self.answer.visible(start, self.stops)
        now = self.answer.visible(end, self.stops, finished=finish is not None)
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": now[len(was) :]}} if self.chat else {"text": now[len(was) :]}
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        if not self.chat:
            choice["prompt_token_ids"] = list(self.answer.prompt_ids) if first and self.wants_ids else None
        choice["token_ids"] = list(self.answer.ids[start:end]) if self.wants_ids else None
        return _event(self._head([choice]))

    def usage(self, completion_tokens: int) -> bytes:
        """The chunk with the counts."""
        prompt = len(self.answer.prompt_ids)
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        return _event(self._head([]) | {"usage": usage})

    def whole(self, count: int, finish: str) -> bytes:
        """The body of an unstreamed answer."""
        text = self.answer.visible(count, self.stops, finished=True)
        choice: dict[str, Any] = {"index": 0}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        choice["token_ids"] = list(self.answer.ids[:count]) if self.wants_ids else None
        choice["prompt_token_ids"] = list(self.answer.prompt_ids) if self.wants_ids else None
        usage = {"prompt_tokens": len(self.answer.prompt_ids), "completion_tokens": count}
        return _dump(self._head([choice]) | {"usage": usage, "kv_transfer_params": None})

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


_NO_END = {"logprobs": None, "finish_reason": None}
DONE = b"data: [DONE]\n\n"


def undisturbed(voice: Voice) -> bytes:
    """The bytes of the whole stream, token by token, from an engine that nothing happens to."""
    count = voice.answer.length(voice.stops)
    finish = "stop" if count < len(voice.answer.pieces) else voice.answer.finish
    parts = [voice.role()] if voice.chat else []
    for i in range(count):
        parts.append(voice.tokens(i, i + 1, first=i == 0, finish=finish if i + 1 == count else None))
    if voice.wants_usage:
        parts.append(voice.usage(count))
    return b"".join(parts) + DONE


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _dump(chunk) + b"\n\n"


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
