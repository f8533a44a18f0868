"""What of a worker's stream from `/generate` is sent on to the client. Pure.

Owns what was sent of one such stream: ids, text, the ending. Invariant: over all attempts the client's stream is one:
its ids and its text only grow, each event tells it as the first engine did (all so far, or what is new), and nothing of
an attempt is handed out whose ids differ from the journal, or whose text from what was sent, from the difference on.
Whether a stream tells all or what is new shows in its second event; until that is known nothing of a replay is handed
out.
"""

from collections.abc import Sequence
from enum import Enum, auto

from .account import Mismatch
from .coordinator import Reason
from .dialects import generate, openai
from .dialects.generate import Output
from .splice import End, Step
from .sse import Event, encode_event


class _Telling(Enum):
    """What the events of a stream tell."""

    UNKNOWN = auto()
    ALL = auto()
    NEW = auto()


class _Stop(Exception):
    """The attempt is over before its end; what was handed out before stays."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


class GenerateSplicer:
    """Splices one stream with one answer. Call `begin` for each attempt, then `feed`, then `end_of_stream`."""

    knows_ids = True

    def __init__(self) -> None:
        self._dialect = generate.Generate()
        # What the client has.
        self._ids: list[int] = []
        self._text = ""
        self._name: str | None = None
        self._finish_sent = self._done_sent = False
        self._refused = self._opaque = False
        self._telling = _Telling.UNKNOWN
        self._attempts = 0
        # What the current attempt has said, and the ids that it must begin with.
        self._said_ids: list[int] = []
        self._said_text = ""
        self._known: Sequence[int] = ()
        self._out: list[bytes] = []
        self._fresh = False
        self._tokens = 0

    @property
    def delivered(self) -> tuple[int, ...]:
        """The output ids that the client has."""
        return tuple(self._ids)

    @property
    def opaque(self) -> bool:
        """Whether something was forwarded that cannot be accounted for: the stream cannot change workers any more."""
        return self._opaque

    @property
    def untouched(self) -> bool:
        """Whether the client has nothing of an answer yet."""
        return not self._ids and not self._text and not self._opaque

    def begin(self, expected: Sequence[int] = ()) -> str | None:
        """A new attempt, whose ids must begin with `expected`. Returns what is wrong with that, if anything."""
        self._attempts += 1
        self._said_ids, self._said_text = [], ""
        if any(a != b for a, b in zip(self._ids, expected, strict=False)):
            return f"the journal differs from the {len(self._ids)} tokens that the client has"
        self._known = expected if len(expected) >= len(self._ids) else self._ids
        return None

    def feed(self, events: Sequence[Event]) -> Step:
        """Account for events of the current attempt and return what of them the client lacks."""
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

    def confirm(self) -> Step:
        """The ending was one, which the finish reason says already."""
        return Step(b"", End.FINISHED)

    def end_of_stream(self) -> Step:
        """The worker's stream has ended: in good order only if `[DONE]` was there or can be added."""
        if self._done_sent:
            return Step(b"", End.FINISHED)
        if self.may_close():
            return Step(self.close(), End.FINISHED, fresh=True)
        return Step(b"", End.INTERRUPTED, reason=Reason.EOF, text="the worker's stream ended without a finish reason")

    def may_close(self) -> bool:
        """Whether only `[DONE]` is missing."""
        return (self._refused or self._finish_sent) and not self._done_sent

    def may_finish(self, journal: Sequence[int]) -> bool:
        """Only an engine knows what its last event tells besides."""
        return False

    def close(self, finish: str | None = None) -> bytes:
        """The rest of the ending."""
        self._done_sent = True
        return encode_event(openai.DONE)

    def failing(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own, as the last event of this stream."""
        return self._dialect.error_event(kind, code, message, 0)

    def _step(self, end: End, reason: Reason, text: str) -> Step:
        return Step(b"".join(self._out), end, self._fresh, self._tokens, reason, text)

    def _take(self, event: Event) -> None:
        data = event.data
        if data is None:
            self._out.append(event.raw)
        elif data == openai.DONE:
            if not (self._finish_sent or self._refused or self._opaque):
                raise _Stop(Reason.EOF, "the worker said [DONE] without a finish reason")
            self._out.append(event.raw)
            self._done_sent = True
        elif (output := generate.decode_output(data)) is None:
            if self._attempts > 1:
                raise _Stop(Reason.ENGINE_ERROR, "a replay holds an event that is not understood")
            self._opaque = self._fresh = True
            self._out.append(event.raw)
        elif output.error is not None:
            self._take_error(event, output.error)
        else:
            self._take_output(event.raw, data, output)

    def _take_error(self, event: Event, error: dict[str, object] | str) -> None:
        status = openai.error_status(error)
        if self._attempts == 1 and self.untouched and status is not None and 400 <= status < 500:
            # The request's own fault: another worker would say the same.
            self._out.append(event.raw)
            self._refused = True
            return
        raise _Stop(Reason.ENGINE_ERROR, f"the engine reported an error: {openai.error_text(error)}")

    def _take_output(self, raw: bytes, data: bytes, output: Output) -> None:
        meta, ids, text = output.meta_info, output.output_ids, output.text
        assert meta is not None
        assert ids is not None
        assert text is not None
        finish = None if meta.finish_reason is None else meta.finish_reason.type
        if finish in openai.INTERRUPTED_FINISHES:
            raise _Stop(Reason.ABORT, f"the engine ended the request with {finish!r}")
        start = meta.completion_tokens - len(ids)
        if not 0 <= start <= len(self._said_ids):
            raise Mismatch(f"{len(ids)} ids are told as the last of {meta.completion_tokens}, after {start} are known")
        if self._said_ids:
            telling = _Telling.NEW if start else _Telling.ALL
            if self._telling is _Telling.UNKNOWN:
                self._telling = telling
        self._say(start, ids, text)
        if finish is not None and (len(self._said_ids) < len(self._known) or len(self._said_text) < len(self._text)):
            raise Mismatch(f"the worker finished after {len(self._said_ids)} tokens, {len(self._known)} are known")
        self._hand_out(raw, data, meta.id, ends=finish is not None)

    def _say(self, start: int, ids: list[int], text: str) -> None:
        """Take down what the attempt has said so far, and compare it with what is known."""
        said = len(self._said_ids)
        whole = ids if not start else self._said_ids[:start] + ids
        if whole[:said] != self._said_ids:
            raise Mismatch(f"the worker takes back one of the {said} ids that it has told")
        for place, (one, journaled) in enumerate(zip(whole[said:], self._known[said:], strict=False), said + 1):
            if one != journaled:
                raise Mismatch(f"token {place} is {one} where the journal has {journaled}")
        self._tokens += len(whole) - said
        self._said_ids = whole
        self._said_text = text if not start else self._said_text + text
        common = min(len(self._said_text), len(self._text))
        if self._attempts > 1 and self._said_text[:common] != self._text[:common]:
            raise Mismatch("the text differs from what the client has")

    def _hand_out(self, raw: bytes, data: bytes, name: str | None, *, ends: bool) -> None:
        fresh_ids, fresh_text = self._said_ids[len(self._ids) :], self._said_text[len(self._text) :]
        behind = len(self._said_ids) < len(self._ids) or len(self._said_text) < len(self._text)
        if self._attempts == 1:
            self._name = self._name or name
            self._out.append(raw)
        elif behind or not (fresh_ids or fresh_text or ends):
            return
        elif not self._ids and not self._text:
            self._name = self._name or name
            self._out.append(raw)
        elif self._telling is _Telling.UNKNOWN:
            if ends:
                raise Mismatch("the answer ends before it shows whether its events tell all or what is new")
            return
        elif self._telling is _Telling.ALL:
            rest = generate.rewritten(data, text=self._said_text, ids=self._said_ids, name=self._name)
            self._out.append(rest)
        else:
            self._out.append(generate.rewritten(data, text=fresh_text, ids=fresh_ids, name=self._name))
        self._fresh = self._fresh or bool(fresh_ids or fresh_text or ends)
        self._ids, self._text = list(self._said_ids), self._said_text
        self._finish_sent = self._finish_sent or ends
