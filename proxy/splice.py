"""What the client has, what a worker says again, and what is still to be sent. Pure.

Owns the account of one stream: the token ids and the text of each field that the client was sent. Invariant: the bytes
handed out over all attempts are one undisturbed stream; nothing is left out, nothing repeated, and nothing of an
attempt whose ids differ from the journal, or whose text differs from what was sent, is handed out from the difference
on. Ids decide where a stream goes on; text only has to agree. It does not read sockets, and does not choose workers.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import StringIO

import msgspec

from .coordinator import Reason
from .dialects import openai, openai_edit
from .dialects.hiding import Hiding, hide_ids
from .dialects.openai import Choice, Chunk
from .sse import Event, encode_event


class End(StrEnum):
    """What became of an attempt, as far as its bytes tell."""

    GOES_ON = "goes_on"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    MISMATCH = "mismatch"


class Step(msgspec.Struct, frozen=True, gc=False):
    """What to send now, and whether the attempt goes on. A struct, because one is made for every read.

    `fresh` is true when `out` holds something that the client never had; `tokens` counts what arrived, replays
    included.
    """

    out: bytes
    end: End = End.GOES_ON
    fresh: bool = False
    tokens: int = 0
    reason: Reason = Reason.EOF
    text: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client asked for, as far as it shapes the stream.

    `hiding` is None where the client asked for token ids itself. `holds_back` says that the engine may keep text of
    delivered tokens back (stop strings, parsers), so that only an engine can write the ending.
    """

    chat: bool
    hiding: Hiding | None = Hiding.NULL
    usage: bool = False
    stop_strings: bool = False
    holds_back: bool = False


class _Stop(Exception):
    """Ends the reading of a batch of events; carries the verdict."""

    def __init__(self, end: End, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.end, self.reason, self.text = end, reason, text


def _mismatch(text: str) -> _Stop:
    return _Stop(End.MISMATCH, Reason.MISMATCH, text)


class Splicer:
    """The account of one stream with one choice. Call `begin` for each attempt, then `feed`, then `end_of_stream`."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._hides = wishes.hiding is not None
        self._sent_ids = array("L")
        self._sent_text: dict[str, StringIO] = {}
        self._identity: openai_edit.Identity | None = None
        self._prompt_tokens: int | None = None
        self._role_sent = self._prompt_ids_sent = False
        self._finish_sent = self._usage_sent = self._done_sent = False
        self._refused = False
        # Whether the newest tokens came with text: if not, their engine may still owe it (parsers that wait).
        self._last_had_text = False
        self._opaque = False
        self._attempts = 0
        # Of the current attempt: what it must say, and how far it has come.
        self._known: Sequence[int] = ()
        self._seen_ids = 0
        self._seen_chars: dict[str, int] = {}
        self._replaying = False
        self._out: list[bytes] = []
        self._fresh = False
        self._tokens = 0

    @property
    def delivered(self) -> tuple[int, ...]:
        """The output ids that the client has."""
        return tuple(self._sent_ids)

    @property
    def nothing_delivered(self) -> bool:
        """Whether the client has no token yet (it may have the role)."""
        return not self._sent_ids and not self._sent_text

    @property
    def opaque(self) -> bool:
        """Whether something was forwarded that cannot be accounted for: the stream cannot change workers any more."""
        return self._opaque

    @property
    def prompt_tokens(self) -> int | None:
        """How long the prompt is, once the engine has told."""
        return self._prompt_tokens

    def begin(self, expected: Sequence[int] = ()) -> str | None:
        """A new attempt, whose ids must begin with `expected`. Returns what is wrong with that, if anything."""
        self._attempts += 1
        sent = self.delivered
        if any(a != b for a, b in zip(sent, expected, strict=False)):
            return f"the journal differs from the {len(sent)} tokens that the client has"
        self._known = tuple(expected) if len(expected) >= len(sent) else sent
        self._seen_ids = 0
        self._seen_chars = {}
        self._replaying = self._attempts > 1
        return None

    def feed(self, events: Sequence[Event]) -> Step:
        """Account for events of the current attempt and return what of them the client lacks."""
        if len(events) == 1 and self._attempts == 1 and (step := self._usual(events[0])) is not None:
            return step
        self._out, self._fresh, self._tokens = [], False, 0
        try:
            for event in events:
                if self._done_sent:
                    break
                self._take(event)
        except _Stop as stop:
            return self._step(stop.end, stop.reason, stop.text)
        return self._step(End.FINISHED if self._done_sent else End.GOES_ON, Reason.EOF, "")

    def end_of_stream(self) -> Step:
        """The worker's stream has ended: in good order only if `[DONE]` was there or can be added."""
        if self._done_sent:
            return Step(b"", End.FINISHED)
        if self.may_close():
            return Step(self.close(), End.FINISHED, fresh=True)
        return Step(b"", End.INTERRUPTED, reason=Reason.EOF, text="the worker's stream ended without a finish reason")

    def may_close(self) -> bool:
        """Whether only formalities are missing (usage, `[DONE]`) that the proxy can write itself."""
        return self._finish_sent and self._usage_known()

    def may_finish(self, journal: Sequence[int]) -> bool:
        """Whether the client has every token of a finished `journal`, and all text of them.

        Engines that hold text back may still owe some of it, so there an engine must write the ending.
        """
        return (
            not self._finish_sent
            and self._identity is not None
            and not self._wishes.holds_back
            and self._last_had_text
            and len(self._sent_ids) > 0
            and self.delivered == tuple(journal)
            and self._usage_known()
        )

    def close(self, finish: str | None = None) -> bytes:
        """Write the rest of the ending in the stream's own form."""
        out: list[bytes] = []
        identity = self._identity or openai_edit.Identity(None, None, None, None, None)
        if finish is not None and not self._finish_sent:
            wants_ids = self._wishes.hiding is None
            out.append(openai_edit.finish_event(identity, finish, chat=self._wishes.chat, wants_ids=wants_ids))
            self._finish_sent = True
        if self._wishes.usage and not self._usage_sent and self._prompt_tokens is not None:
            out.append(
                openai_edit.usage_event(
                    identity, prompt_tokens=self._prompt_tokens, completion_tokens=len(self._sent_ids)
                )
            )
            self._usage_sent = True
        out.append(openai_edit.done_event())
        self._done_sent = True
        return b"".join(out)

    def _usage_known(self) -> bool:
        return not self._wishes.usage or self._usage_sent or self._prompt_tokens is not None

    def _step(self, end: End, reason: Reason, text: str) -> Step:
        return Step(b"".join(self._out), end, self._fresh, self._tokens, reason, text)

    def _usual(self, event: Event) -> Step | None:
        """The step for the one event that nearly all reads hold: some text in the middle of an undisturbed stream.

        It says what the rules below say of such an event, in one piece, because the delay of each token is spent here;
        None leaves the event to them.
        """
        data = event.data
        if data is None or self._done_sent or b"\n" in data or (chunk := openai.decode_chunk(data)) is None:
            return None
        if not chunk.choices or chunk.error is not None or chunk.prompt_token_ids is not None:
            return None
        choice = chunk.choices[0]
        ids, text, key, delta = choice.token_ids, choice.text, "text", choice.delta
        if delta is not None:
            if delta.role is not None or delta.reasoning or delta.reasoning_content or delta.tool_calls:
                return None
            text, key = delta.content, "content"
        account = self._sent_text.get(key)
        if (
            not text
            or ids is None
            or choice.finish_reason is not None
            or choice.prompt_token_ids is not None
            or account is None
            or self._identity is None
        ):
            return None
        self._sent_ids.extend(ids)
        self._seen_ids += len(ids)
        account.write(text)
        self._last_had_text = True
        hiding = self._wishes.hiding
        raw = event.raw if hiding is None else hide_ids(event.raw, hiding)
        return Step(raw, End.GOES_ON, True, len(ids))

    def _take(self, event: Event) -> None:
        data = event.data
        if data is None:
            self._out.append(event.raw)
            return
        if data == openai.DONE:
            self._take_done(event)
            return
        chunk = openai.decode_chunk(data)
        if chunk is None:
            self._take_opaque(event)
        elif chunk.error is not None:
            self._take_error(event, chunk.error)
        else:
            if self._prompt_tokens is None:
                self._learn(chunk)
            if chunk.choices:
                self._take_choice(event, data, chunk, chunk.choices[0])
            else:
                self._take_trailer(event, chunk)

    def _take_done(self, event: Event) -> None:
        if not self._finish_sent and not self._refused and not self._opaque:
            raise _Stop(End.INTERRUPTED, Reason.EOF, "the worker said [DONE] without a finish reason")
        self._out.append(event.raw)
        self._done_sent = True

    def _take_opaque(self, event: Event) -> None:
        if self._replaying:
            raise _Stop(End.INTERRUPTED, Reason.ENGINE_ERROR, "a replay holds an event that is not understood")
        self._opaque = True
        self._fresh = True
        raw = event.raw
        self._out.append(raw if self._wishes.hiding is None else hide_ids(raw, self._wishes.hiding))

    def _take_error(self, event: Event, error: dict[str, object] | str) -> None:
        status = openai.error_status(error)
        if self.nothing_delivered and self._attempts == 1 and status is not None and 400 <= status < 500:
            # The request's own fault: another worker would say the same.
            self._out.append(event.raw)
            self._refused = True
            return
        text = f"the engine reported an error: {openai.error_text(error)}"
        raise _Stop(End.INTERRUPTED, Reason.ENGINE_ERROR, text)

    def _learn(self, chunk: Chunk) -> None:
        ids = chunk.prompt_token_ids
        if ids is None and chunk.choices:
            ids = chunk.choices[0].prompt_token_ids
        if ids is not None:
            self._prompt_tokens = len(ids)
        elif chunk.usage is not None:
            self._prompt_tokens = chunk.usage.prompt_tokens

    def _take_trailer(self, event: Event, chunk: Chunk) -> None:
        """A chunk without choices: the usage, once."""
        if chunk.usage is not None:
            if self._usage_sent:
                return
            self._usage_sent = True
        elif self._replaying:
            return
        self._send(event.raw, chunk)

    def _take_choice(self, event: Event, data: bytes, chunk: Chunk, choice: Choice) -> None:
        if choice.finish_reason in openai.INTERRUPTED_FINISHES:
            text = f"the engine ended the request with {choice.finish_reason!r}"
            raise _Stop(End.INTERRUPTED, Reason.ABORT, text)
        ids = choice.token_ids or ()
        self._tokens += len(ids)
        if self._replaying:
            self._take_replayed(event, data, chunk, choice, ids)
            return
        added = openai.texts(choice)
        self._sent_ids.extend(ids)
        self._seen_ids += len(ids)
        for key, text in added:
            self._text_of(key).write(text)
        if ids:
            self._last_had_text = bool(added)
        if choice.finish_reason is not None:
            self._finish_sent = True
        if ids or added or self._finish_sent:
            self._fresh = True
        if self._hides and choice.delta is not None and openai.only_because_of_ids(data, choice):
            return
        self._note_head(chunk, choice)
        self._send(event.raw, chunk, data)

    def _take_replayed(self, event: Event, data: bytes, chunk: Chunk, choice: Choice, ids: Sequence[int]) -> None:
        """A chunk of a later attempt, of which the client may have all, a part or nothing."""
        self._check_ids(ids)
        known_ids = min(len(ids), max(0, len(self._sent_ids) - self._seen_ids))
        known_chars = self._check_text(choice)
        new_text = any(len(t) > known_chars.get(key, 0) for key, t in _joined(choice).items())
        role = choice.delta is not None and choice.delta.role is not None
        heads = self._heads_sent(choice)
        self._seen_ids += len(ids)
        if choice.finish_reason is not None:
            self._check_complete(choice.finish_reason)
        fresh = known_ids < len(ids) or new_text or choice.finish_reason is not None
        new_role = role and not self._role_sent
        if fresh or new_role:
            self._fresh = self._fresh or fresh
            whole = not known_ids and not any(known_chars.values()) and not heads
            prompt_ids_again = self._prompt_ids_sent and _prompt_ids(chunk, choice) is not None
            role_again = role and self._role_sent
            self._account_new(choice, ids[known_ids:], known_chars)
            if whole and not prompt_ids_again and not role_again:
                self._note_head(chunk, choice)
                if self._wishes.hiding is None or not openai.only_because_of_ids(data, choice):
                    self._send(event.raw, chunk, data)
            else:
                trim = openai_edit.Trim(known_ids, known_chars, role_again, prompt_ids_again, heads)
                self._note_head(chunk, choice)
                self._send(encode_event(openai_edit.trimmed(data, trim)), chunk)
        self._replaying = not self._caught_up()

    def _check_ids(self, ids: Sequence[int]) -> None:
        known = self._known[self._seen_ids : self._seen_ids + len(ids)]
        for offset, (said, journaled) in enumerate(zip(ids, known, strict=False)):
            if said != journaled:
                raise _mismatch(f"token {self._seen_ids + offset + 1} is {said} where the journal has {journaled}")

    def _check_text(self, choice: Choice) -> dict[str, int]:
        """How many characters of each of the chunk's fields the client has; mismatch if they differ from those."""
        known: dict[str, int] = {}
        for key, text in _joined(choice).items():
            seen = self._seen_chars.get(key, 0)
            sent = self._sent_text.get(key)
            if sent is not None:
                sent.seek(seen)
                had = sent.read(len(text))
                sent.seek(0, 2)
                if not text.startswith(had):
                    raise _mismatch(f"the text of {key} differs from what the client has after character {seen}")
                known[key] = len(had)
            self._seen_chars[key] = seen + len(text)
        return known

    def _check_complete(self, finish: str) -> None:
        """An attempt may finish only past everything that the client has and the journal holds."""
        # A stop string ends an answer in the front end, when the core may already have journaled a few tokens more.
        needed = len(self._sent_ids) if self._wishes.stop_strings and finish == "stop" else len(self._known)
        if self._seen_ids < needed:
            raise _mismatch(f"the worker finished after {self._seen_ids} tokens, {needed} are known")
        for key, sent in self._sent_text.items():
            if self._seen_chars.get(key, 0) < sent.tell():
                raise _mismatch(f"the worker finished before the end of the text of {key} that the client has")

    def _caught_up(self) -> bool:
        return self._seen_ids >= max(len(self._known), len(self._sent_ids)) and all(
            self._seen_chars.get(key, 0) >= sent.tell() for key, sent in self._sent_text.items()
        )

    def _heads_sent(self, choice: Choice) -> frozenset[int]:
        """Indices of the chunk's tool calls whose id and name the client has."""
        calls = choice.delta.tool_calls if choice.delta is not None else None
        return frozenset(call.index for call in calls or () if openai.tool_key(call.index, "name") in self._sent_text)

    def _account_new(self, choice: Choice, ids: Sequence[int], known_chars: dict[str, int]) -> None:
        self._sent_ids.extend(ids)
        if ids:
            self._last_had_text = bool(openai.texts(choice))
        for key, text in _joined(choice).items():
            self._text_of(key).write(text[known_chars.get(key, 0) :])
        if choice.finish_reason is not None:
            self._finish_sent = True

    def _text_of(self, key: str) -> StringIO:
        text = self._sent_text.get(key)
        if text is None:
            text = self._sent_text[key] = StringIO(newline="")
        return text

    def _note_head(self, chunk: Chunk, choice: Choice) -> None:
        if choice.delta is not None and choice.delta.role is not None:
            self._role_sent = True
        if _prompt_ids(chunk, choice) is not None:
            self._prompt_ids_sent = True

    def _send(self, raw: bytes, chunk: Chunk, data: bytes | None = None) -> None:
        """Hand out a chunk's event under the stream's identity and without hidden ids."""
        first = self._identity is None
        if self._identity is None:
            self._identity = openai_edit.Identity.of(chunk)
        if data is not None and b"\n" in data and (self._wishes.hiding is not None or self._attempts > 1):
            # JSON spread over several data lines, between which what is to be edited may be broken. Line feeds in JSON
            # are always white space: those of texts are escaped.
            raw = encode_event(data.replace(b"\n", b" "))
        if not first and self._attempts > 1:
            raw = openai_edit.with_identity(raw, chunk, self._identity)
        if self._wishes.hiding is not None:
            raw = hide_ids(raw, self._wishes.hiding)
        self._out.append(raw)


def _prompt_ids(chunk: Chunk, choice: Choice) -> list[int] | None:
    return chunk.prompt_token_ids if chunk.prompt_token_ids is not None else choice.prompt_token_ids


def _joined(choice: Choice) -> dict[str, str]:
    """The text of each field of a chunk; several deltas of one tool call count as one."""
    joined: dict[str, str] = {}
    for key, text in openai.texts(choice):
        joined[key] = joined.get(key, "") + text
    return joined
