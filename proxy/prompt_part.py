"""What of an answer belongs to its prompt: the echoed text, and the log probabilities of the prompt's tokens. Pure.

A session that goes on elsewhere does not repeat its prefill, so it cannot say this again; but it depends on the prompt
alone. So it is asked for by itself (`question`), the session runs without it (`rest`), and it is put where vLLM has it:
into a whole answer (`PromptPart.whole`), or into a stream's first chunk (`StreamGraft`). Invariant: of what a session
says nothing changes but the offsets of its tokens' text. It does not know who is asked.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ..session.errors import EngineError
from .dialects import openai
from .dialects.hiding import Hiding, hide_ids
from .sse import Event, SseParser, encode_event

Body = dict[str, Any]
Raws = dict[str, msgspec.Raw]

_FIELDS = ("echo", "prompt_logprobs")
# How an answer goes on and ends is nothing to its prompt, and some of it forbids an answer of one token.
_OF_THE_OUTPUT = frozenset(
    {"n", "seed", "stream", "stream_options", "min_tokens", "max_completion_tokens", "ignore_eos", "top_logprobs"}
    | {"structured_outputs", "response_format", "logit_bias", "bad_words", "allowed_token_ids"}
    | {"stop", "stop_token_ids"}
)
_OFFSETS = re.compile(rb'((?<!\\)"text_offset"\s*:\s*\[)([\d,\s]*)\]')


class NoPromptPart(EngineError):
    """An answer that should have told of its prompt, or have had room for it; the text says what is missing."""


_NOT_UNDERSTOOD = (msgspec.DecodeError, ValueError, LookupError)


def is_asked_for(body: Body, *, chat: bool) -> bool:
    """Whether a request asks for something of its prompt, in a way that is understood here."""
    echo, logprobs = body.get("echo"), body.get("prompt_logprobs")
    if not echo and logprobs is None:
        return False
    if echo not in (None, False, True) or not (logprobs is None or type(logprobs) is int):
        return False
    if (chat and echo) or (body.get("stream") is True and logprobs is not None):
        return False
    # These make the prompt, or what is told of it, depend on the request for the output.
    return not body.get("logprob_token_ids") and body.get("truncate_prompt_tokens") is None


def rest(body: Body) -> Body:
    """The request without what is asked for of its prompt."""
    return {name: value for name, value in body.items() if name not in _FIELDS}


def question(body: Body) -> Body:
    """The request for what is asked for of the prompt, and for as little as can be besides."""
    asked = {name: value for name, value in body.items() if name not in _OF_THE_OUTPUT}
    if body.get("echo"):
        # vLLM answers this with the prompt alone.
        return asked | {"max_tokens": 0}
    return {name: value for name, value in asked.items() if name != "logprobs"} | {"max_tokens": 1}


_NULL = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: Raws | None = None
    prompt_logprobs: msgspec.Raw = _NULL


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_logprobs: msgspec.Raw = _NULL


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What an engine told of one prompt. `text_len` is how far the offsets of the output's tokens lie behind it."""

    text: str = ""
    logprobs: Raws | None = None
    prompt_logprobs: bytes = b"null"
    text_len: int = 0

    @classmethod
    def of(cls, raw: bytes, *, echo: bool, chat: bool) -> "PromptPart":
        """Read the answer to a question. Raises NoPromptPart."""
        try:
            answer = msgspec.json.decode(raw, type=_Answer)
            [choice] = answer.choices
            if chat or not echo:
                return cls(prompt_logprobs=bytes(answer.prompt_logprobs if chat else choice.prompt_logprobs))
            return cls(
                choice.text,
                choice.logprobs,
                bytes(choice.prompt_logprobs),
                _text_len(choice.logprobs),
            )
        except _NOT_UNDERSTOOD as error:
            raise NoPromptPart(f"the engine's answer about the prompt alone is not understood: {error!r}") from error

    def whole(self, raw: bytes, *, chat: bool) -> bytes:
        """The body of a choice's answer, with the prompt's part. Raises NoPromptPart where there is no room for it."""
        try:
            body = msgspec.json.decode(raw, type=Raws)
            if chat:
                return msgspec.json.encode(self._with_prompt_logprobs(body))
            [choice] = msgspec.json.decode(body["choices"], type=list[Raws])
            edited = self._with_prompt_logprobs(self._grafted(choice))
            return msgspec.json.encode({**body, "choices": [edited]})
        except _NOT_UNDERSTOOD as error:
            raise NoPromptPart(f"the engine's answer has no room for its prompt: {error!r}") from error

    def first_chunk(self, data: bytes, hiding: Hiding | None) -> bytes:
        """The data of a stream's first chunk with the prompt's part; vLLM shows its ids in it, asked or not."""
        body = msgspec.json.decode(data, type=Raws)
        [choice] = msgspec.json.decode(body["choices"], type=list[Raws])
        edited: dict[str, Any] = self._grafted(choice)
        if hiding is Hiding.NULL:
            edited["token_ids"] = None
        elif hiding is Hiding.ABSENT:
            edited.pop("token_ids", None)
        return msgspec.json.encode({**body, "choices": [edited]})

    def shifted(self, raw: bytes) -> bytes:
        """A later chunk's event: its tokens' text lies behind the prompt's."""
        if not self.text_len:
            return raw

        def shift(found: "re.Match[bytes]") -> bytes:
            offsets = [b"%d" % (int(offset) + self.text_len) for offset in found[2].split(b",") if offset.strip()]
            return found[1] + b",".join(offsets) + b"]"

        return _OFFSETS.sub(shift, raw, count=1)

    def _with_prompt_logprobs(self, owner: dict[str, Any]) -> dict[str, Any]:
        if self.prompt_logprobs == b"null":
            return owner
        return owner | {"prompt_logprobs": msgspec.Raw(self.prompt_logprobs)}

    def _grafted(self, choice: Raws) -> dict[str, Any]:
        """A choice with the prompt's text before its own, and the prompt's tokens before its own."""
        edited: dict[str, Any] = dict(choice)
        if self.text:
            edited["text"] = self.text + msgspec.json.decode(choice.get("text", b'""'), type=str)
        logprobs = msgspec.json.decode(choice.get("logprobs", _NULL), type=Raws | None)
        if self.logprobs is not None and logprobs is not None:
            edited["logprobs"] = {name: self._joined(name, value) for name, value in logprobs.items()}
        return edited

    def _joined(self, name: str, value: msgspec.Raw) -> Any:
        before = (self.logprobs or {}).get(name)
        if before is None:
            return value
        if name == "text_offset":
            own = [offset + self.text_len for offset in msgspec.json.decode(value, type=list[int])]
            return [*msgspec.json.decode(before, type=list[int]), *own]
        items = list[msgspec.Raw]
        return [*msgspec.json.decode(before, type=items), *msgspec.json.decode(value, type=items)]


class StreamGraft:
    """Puts the prompt's part into one stream, whose bytes come as they are sent, with all ids in them."""

    def __init__(self, part: PromptPart, hiding: Hiding | None, event_bytes_max: int) -> None:
        self._part = part
        self._hiding = hiding
        self._event_bytes_max = event_bytes_max
        self._parser = SseParser(event_bytes_max)
        self._begun = False

    def take(self, data: bytes) -> bytes:
        """What goes out of some bytes of the stream.

        Raises NoPromptPart where there is no room for the prompt's, and EngineError for an event past the bound; the
        error that tells a client of it can be taken after that.
        """
        try:
            return b"".join(map(self._edited, self._parser.feed(data)))
        except EngineError:
            self._parser = SseParser(self._event_bytes_max)
            raise
        except _NOT_UNDERSTOOD as error:
            self._parser = SseParser(self._event_bytes_max)
            raise NoPromptPart(f"the engine's stream has no room for its prompt: {error!r}") from error

    def _edited(self, event: Event) -> bytes:
        data = event.data
        if data is None or data == openai.DONE or (chunk := openai.decode_chunk(data)) is None or not chunk.choices:
            return event.raw
        if self._begun:
            raw = self._part.shifted(event.raw)
            return raw if self._hiding is None else hide_ids(raw, self._hiding)
        first = encode_event(self._part.first_chunk(data, self._hiding))
        self._begun = True
        return first


def _text_len(logprobs: Raws | None) -> int:
    """Where the text of the next token begins, as vLLM counts: by what its tokens look like."""
    if logprobs is None:
        return 0
    offsets = msgspec.json.decode(logprobs["text_offset"], type=list[int])
    tokens = msgspec.json.decode(logprobs["tokens"], type=list[str])
    return offsets[-1] + len(tokens[-1]) if tokens else 0
