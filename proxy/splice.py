"""What of a worker's stream is sent on to the client. Pure.

Owns what was sent besides tokens (identity, role, finish, usage, `[DONE]`); `account` has the tokens. Invariant: the
bytes handed out over all attempts are one undisturbed stream; nothing is left out, nothing repeated, and nothing of an
attempt whose ids differ from the journal, or whose text differs from what was sent, is handed out from the difference
on. Ids decide where a stream goes on; text only has to agree. It does not read sockets, and does not choose workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from .account import Account, Mismatch, joined_texts
from .coordinator import Reason
from .dialects import openai, openai_edit
from .dialects.by_path import OtherApi
from .dialects.hiding import Hiding, hide_ids, hide_one_list
from .dialects.openai import Choice, Chunk
from .sse import Event, encode_event


class End(StrEnum):
    """What became of an attempt, as far as its bytes tell."""

    GOES_ON = "goes_on"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    MISMATCH = "mismatch"
    # It has ended, but an engine that gives a request up ends it the same way.
    CLAIMED = "claimed"


class Step(msgspec.Struct, frozen=True, gc=False):
    """What to send now, and whether the attempt goes on. A struct, because one is made for every read.

    `fresh` is true when `out` holds something that the client never had; `tokens` counts what arrived, replays
    included: pieces of text where no ids are seen.
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
    delivered tokens back (stop strings, parsers), so that only an engine can write the ending. `shows_ids` is false
    where the engine withholds them, and `events` is how the stream looks where it is none of chunks.
    """

    chat: bool
    hiding: Hiding | None = Hiding.NULL
    usage: bool = False
    stop_strings: bool = False
    holds_back: bool = False
    shows_ids: bool = True
    events: OtherApi | None = None


class _Stop(Exception):
    """The attempt is over before its end; what was handed out before stays."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


class Splicer:
    """Splices one stream with one choice. Call `begin` for each attempt, then `feed`, then `end_of_stream`.

    Where ids are withheld text alone decides, which every attempt tells from the beginning.
    """

    def __init__(self, wishes: Wishes) -> None:
        self.knows_ids = wishes.shows_ids
        self._wishes = wishes
        self._hides = wishes.hiding is not None
        self._account = Account()
        self._identity: openai_edit.Identity | None = None
        self._prompt_tokens: int | None = None
        self._role_sent = self._prompt_ids_sent = False
        self._finish_sent = self._usage_sent = self._done_sent = False
        self._refused = False
        self._opaque = False
        self._attempts = 0
        # Whether the current attempt may still say what the client has.
        self._replaying = False
        self._out: list[bytes] = []
        self._fresh = False
        self._tokens = 0

    @property
    def delivered(self) -> tuple[int, ...]:
        """The output ids that the client has."""
        return self._account.ids

    @property
    def opaque(self) -> bool:
        """Whether something was forwarded that cannot be accounted for: the stream cannot change workers any more."""
        return self._opaque

    @property
    def untouched(self) -> bool:
        """Whether the client has nothing of an answer yet."""
        return self._account.is_empty and not self._opaque

    def begin(self, expected: Sequence[int] = ()) -> str | None:
        """A new attempt, whose ids must begin with `expected`. Returns what is wrong with that, if anything."""
        self._attempts += 1
        self._replaying = self._attempts > 1
        try:
            self._account.begin(expected if self.knows_ids else ())
        except Mismatch as mismatch:
            return str(mismatch)
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
            return self._step(End.INTERRUPTED, stop.reason, stop.text)
        except Mismatch as mismatch:
            return self._step(End.MISMATCH, Reason.MISMATCH, str(mismatch))
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
        return self._refused or (self._finish_sent and self._usage_known())

    def may_finish(self, journal: Sequence[int]) -> bool:
        """Whether the client has every token of a finished `journal`, and all text of them.

        Engines that hold text back may still owe some of it, so there an engine must write the ending.
        """
        return (
            self.knows_ids
            and not self._finish_sent
            and self._identity is not None
            and not self._wishes.holds_back
            and not self._account.owes_text
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
        if self._finish_sent and self._wishes.usage and not self._usage_sent and self._prompt_tokens is not None:
            out.append(
                openai_edit.usage_event(
                    identity, prompt_tokens=self._prompt_tokens, completion_tokens=self._account.token_count
                )
            )
            self._usage_sent = True
        out.append(openai_edit.done_event())
        self._done_sent = True
        return b"".join(out)

    def confirm(self) -> Step:
        """The ending was one, which the finish reason of a chunk says already."""
        return Step(b"", End.FINISHED)

    def failing(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own, as the last event of this stream."""
        return openai_edit.error_event(message, kind, code)

    def _usage_known(self) -> bool:
        counts_known = self.knows_ids and self._prompt_tokens is not None
        return not self._wishes.usage or self._usage_sent or counts_known

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
        if (
            not text
            or ids is None
            or choice.finish_reason is not None
            or choice.prompt_token_ids is not None
            or self._identity is None
        ):
            return None
        self._account.enter_later(ids, key, text)
        hiding = self._wishes.hiding
        raw = event.raw if hiding is None else hide_one_list(event.raw, hiding)
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
            raise _Stop(Reason.EOF, "the worker said [DONE] without a finish reason")
        self._out.append(event.raw)
        self._done_sent = True

    def _take_opaque(self, event: Event) -> None:
        if self._replaying:
            raise _Stop(Reason.ENGINE_ERROR, "a replay holds an event that is not understood")
        self._opaque = True
        self._fresh = True
        raw = event.raw
        self._out.append(raw if self._wishes.hiding is None else hide_ids(raw, self._wishes.hiding))

    def _take_error(self, event: Event, error: dict[str, object] | str) -> None:
        status = openai.error_status(error)
        if self._account.is_empty and self._attempts == 1 and status is not None and 400 <= status < 500:
            # The request's own fault: another worker would say the same.
            self._out.append(event.raw)
            self._refused = True
            return
        text = f"the engine reported an error: {openai.error_text(error)}"
        raise _Stop(Reason.ENGINE_ERROR, text)

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
            raise _Stop(Reason.ABORT, text)
        ids = choice.token_ids or ()
        self._tokens += len(ids) if self.knows_ids else bool(openai.texts(choice))
        if self._replaying:
            self._take_replayed(event, data, chunk, choice, ids)
            return
        added = openai.texts(choice)
        self._account.enter(ids, added)
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
        account = self._account
        known_ids, known_chars = account.check_ids(ids), account.check_text(choice)
        if choice.finish_reason is not None:
            account.check_complete(ended_by_text=self._wishes.stop_strings and choice.finish_reason == "stop")
        new_text = any(len(text) > known_chars.get(key, 0) for key, text in joined_texts(choice).items())
        role = choice.delta is not None and choice.delta.role is not None
        heads = account.tool_heads(choice)
        finishes = choice.finish_reason is not None and not self._finish_sent
        fresh = known_ids < len(ids) or new_text or finishes
        new_role = role and not self._role_sent
        if fresh or new_role:
            self._fresh = self._fresh or fresh
            whole = not known_ids and not any(known_chars.values()) and not heads
            prompt_ids_again = self._prompt_ids_sent and _prompt_ids(chunk, choice) is not None
            role_again = role and self._role_sent
            account.enter_rest(choice, ids[known_ids:], known_chars)
            self._finish_sent = self._finish_sent or finishes
            if whole and not prompt_ids_again and not role_again:
                self._note_head(chunk, choice)
                if self._wishes.hiding is None or not openai.only_because_of_ids(data, choice):
                    self._send(event.raw, chunk, data)
            else:
                trim = openai_edit.Trim(known_ids, known_chars, role_again, prompt_ids_again, heads)
                self._note_head(chunk, choice)
                self._send(encode_event(openai_edit.trimmed(data, trim)), chunk)
        self._replaying = not account.caught_up()

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
