"""Puts the answers of several choices together: the chunks of their streams, or their whole bodies. Pure.

Owns what belongs to the answer as a whole: its identity, the choices' indices, the counts of all of them together, the
one `[DONE]`. Invariant: of a chunk nothing changes but the index of its choice and the identity, and the counts are
vLLM's: each prompt once, the outputs of all choices. It does not know how the choices came about.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..session.errors import EngineError
from .dialects import openai, openai_edit
from .dialects.openai_edit import Identity
from .report import Report
from .sse import Event, SseParser, encode_event

_INDEX = re.compile(rb'((?<!\\)"choices"\s*:\s*\[\s*\{\s*"index"\s*:\s*)0(?=\s*[,}])')
_WHOLE_INDEX = re.compile(rb'(\A\s*\{\s*"index"\s*:\s*)0(?=\s*[,}])')


class NotMergeable(Exception):
    """An answer that does not look as one choice's answer does; the text says in what."""


class MergedStream:
    """The streams of several choices as one: tell it what each of them says, in the order in which that goes out.

    `prompts` holds the index of each choice's prompt. An error ends the stream: the choice that said it may end its own
    (`failed` says which), and of the others nothing goes out any more.
    """

    def __init__(self, prompts: Sequence[int], sessions: Sequence[str], answer: str, event_bytes_max: int) -> None:
        self._prompts = tuple(prompts)
        self._sessions = tuple(sessions)
        self._answer = answer
        self._event_bytes_max = event_bytes_max
        self._parsers = [SseParser(event_bytes_max) for _ in prompts]
        self._identity: Identity | None = None
        self._reports: dict[int, Report] = {}
        self._usages: dict[int, dict[str, Any]] = {}
        self._usage_chunk: dict[str, Any] | None = None
        self._done: set[int] = set()
        self.failed: int | None = None
        self._over = False

    @property
    def complete(self) -> bool:
        """Whether every choice has ended well."""
        return self.failed is None and not self._over and len(self._done) == len(self._prompts)

    def take(self, index: int, data: bytes) -> bytes:
        """What goes out of some bytes of a choice's stream. Raises EngineError for an event past the bound."""
        out: list[bytes] = []
        try:
            events = self._parsers[index].feed(data)
        except EngineError:
            # What the choice says next is its error, and must not become a part of that event.
            self._parsers[index] = SseParser(self._event_bytes_max)
            raise
        for event in events:
            if self.failed in (None, index) and not self._over:
                self._take(index, event, out)
        return b"".join(out)

    def fail(self) -> bool:
        """An error that comes from elsewhere ends the stream; False if another one has already."""
        first = self.failed is None and not self._over
        self._over = True
        return first

    def ending(self) -> bytes:
        """What comes after the last chunk of a stream whose choices are all done: the counts, and `[DONE]`."""
        out = b""
        if self._usage_chunk is not None:
            # A stream that is not one request's is given no measurements of one.
            chunk = {name: value for name, value in self._usage_chunk.items() if name != "metrics"}
            usage = merged_usage([self._usages.get(i) for i in range(len(self._prompts))], self._prompts)
            out = encode_event(msgspec.json.encode(self._named(chunk) | {"usage": usage}))
        return out + openai_edit.done_event()

    def report(self) -> Report | None:
        """What happened to all choices together; None if that was not told."""
        return Report.of_all(tuple(self._reports.values()))

    def _take(self, index: int, event: Event, out: list[bytes]) -> None:
        data = event.data
        if data is None:
            report = Report.of_comment(event.raw)
            if report is None:
                out.append(event.raw)
            else:
                self._reports[index] = report
            return
        if data == openai.DONE:
            self._done.add(index)
            if self.failed is not None:
                out.append(event.raw)
            return
        chunk = openai.decode_chunk(data)
        if chunk is None:
            # Not to be understood, but somebody's: it goes to the client as it would alone.
            out.append(_reindexed(event, index))
            return
        if chunk.error is not None:
            self.failed = index
            out.append(event.raw)
            return
        if not chunk.choices and chunk.usage is not None:
            self._usage_chunk = msgspec.json.decode(data)
            self._usages[index] = self._usage_chunk["usage"]
            return
        if self._identity is None:
            self._identity = self._identity_of(chunk)
        raw = _reindexed(event, index) if chunk.choices and index else event.raw
        out.append(openai_edit.with_identity(raw, chunk, self._identity))

    def _identity_of(self, chunk: openai.Chunk) -> Identity:
        """The first chunk's, under the id of the whole answer."""
        return Identity.of(msgspec.structs.replace(chunk, id=self._id(chunk.id)))

    def _named(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._identity is None:
            return chunk
        return chunk | {name: value for name, value in self._identity.header().items() if name in chunk}

    def _id(self, text: str | None) -> str | None:
        return None if text is None else answer_id(text, self._sessions, self._answer)


def answer_id(text: str, sessions: Sequence[str], answer: str) -> str:
    """The id of an answer whose choices are several sessions: engines make ids of the names of requests."""
    for session in sessions:
        if session in text:
            return text.replace(session, answer)
    return text


def merged_usage(usages: Sequence[dict[str, Any] | None], prompts: Sequence[int]) -> dict[str, Any]:
    """The counts of several choices: each prompt's once, the outputs of all."""
    counted: set[int] = set()
    merged: dict[str, Any] = {}
    details: dict[str, int] = {}
    prompt_tokens = completion_tokens = 0
    for usage, prompt in zip(usages, prompts, strict=True):
        if usage is None:
            continue
        # Other fields, such as how much of a prompt was cached, are the first's, as in vLLM's streams.
        merged = merged or usage
        completion_tokens += usage.get("completion_tokens") or 0
        for name, value in (usage.get("completion_tokens_details") or {}).items():
            if type(value) is int:
                details[name] = details.get(name, 0) + value
        if prompt not in counted:
            counted.add(prompt)
            prompt_tokens += usage.get("prompt_tokens") or 0
    sums: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if details:
        sums["completion_tokens_details"] = details
    return merged | sums


class _Usages(msgspec.Struct):
    usage: dict[str, Any] | None = None


def merged_bodies(bodies: Sequence[bytes], prompts: Sequence[int], sessions: Sequence[str], answer: str) -> bytes:
    """The body of an unstreamed answer, of the bodies of its choices. Raises NotMergeable."""
    choices: list[msgspec.Raw] = []
    usages: list[dict[str, Any] | None] = []
    merged: dict[str, msgspec.Raw] = {}
    for index, body in enumerate(bodies):
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            choice = msgspec.json.decode(fields["choices"], type=list[msgspec.Raw])
            usages.append(msgspec.json.decode(body, type=_Usages).usage)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
            raise NotMergeable(f"the answer of choice {index} is not understood: {error!r}") from error
        if len(choice) != 1:
            raise NotMergeable(f"the answer of choice {index} holds {len(choice)} choices instead of one")
        merged = merged or fields
        choices.append(msgspec.Raw(_whole_reindexed(bytes(choice[0]), index)))
    whole: dict[str, Any] = dict(merged)
    whole["choices"] = choices
    if any(usage is not None for usage in usages):
        whole["usage"] = merged_usage(usages, prompts)
    if "id" in merged:
        name = msgspec.json.decode(merged["id"])
        whole["id"] = answer_id(name, sessions, answer) if isinstance(name, str) else name
    if "metrics" in merged:
        whole["metrics"] = None
    return msgspec.json.encode(whole)


def _reindexed(event: Event, index: int) -> bytes:
    """The event with another index of its choice. Engines write it first; elsewhere it takes a decoder to find it."""
    raw, count = _INDEX.subn(rb"\g<1>%d" % index, event.raw, count=1)
    if count or not index or event.data is None:
        return raw
    try:
        body = msgspec.json.decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw
    choices = body.get("choices") if isinstance(body, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            choice["index"] = index
    return encode_event(msgspec.json.encode(body))


def _whole_reindexed(choice: bytes, index: int) -> bytes:
    edited, count = _WHOLE_INDEX.subn(rb"\g<1>%d" % index, choice, count=1)
    if count or not index:
        return edited
    body = msgspec.json.decode(choice)
    return msgspec.json.encode({**body, "index": index} if isinstance(body, dict) else body)
