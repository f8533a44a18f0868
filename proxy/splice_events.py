"""What of a worker's stream of events is sent on to the client, where events carry no token ids. Pure.

Owns what was sent and not yet sent of one such stream; `transcript` has what it said, the dialect what events mean.
Invariant: the bytes handed out over all attempts are one undisturbed stream: each frame once and in order, text without
gap or repetition, numbers that go on, and the first stream's ids. Nothing is handed out of an attempt that does not
begin with all that the client has. Frames that close something are held back until the next event: an engine that gives
a request up closes it like one that has finished it.
"""

from collections.abc import Sequence

from .account import Mismatch
from .coordinator import Reason
from .dialects.events import Edit, EventDialect, Name, Piece, Role
from .splice import End, Step
from .sse import Event
from .transcript import Transcript


class _Stop(Exception):
    """The attempt is over before its end; what was handed out before stays."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


class EventSplicer:
    """Splices one stream of events. Call `begin` for each attempt, then `feed`, then `end_of_stream`."""

    # No token is known by its id: the journal alone knows what was delivered.
    knows_ids = False
    delivered: tuple[int, ...] = ()

    def __init__(self, dialect: EventDialect) -> None:
        self._dialect = dialect
        self._transcript = Transcript()
        self._attempts = 0
        self._replaying = False
        self._names: dict[Name, str | int] = {}
        self._sequence = 0
        self._held: list[tuple[Event, Piece]] = []
        # An ending of which the stream cannot tell whether it is one; it follows what is held.
        self._claim: tuple[Event, Piece] | None = None
        self._over = False
        self._opaque = False
        self._out: list[bytes] = []
        self._fresh = False
        self._beats = 0

    @property
    def opaque(self) -> bool:
        """Whether something was forwarded that cannot be accounted for: the stream cannot change workers any more."""
        return self._opaque

    @property
    def untouched(self) -> bool:
        """Whether the client has nothing of an answer yet."""
        return not self._transcript.has_text and not self._opaque

    def begin(self, expected: Sequence[int] = ()) -> str | None:
        """A new attempt. Nothing can be wrong with ids that are not seen."""
        self._attempts += 1
        self._transcript.begin()
        self._replaying = not self._transcript.caught_up()
        self._names, self._held, self._claim = {}, [], None
        return None

    def feed(self, events: Sequence[Event]) -> Step:
        """Account for events of the current attempt and return what of them the client lacks."""
        self._out, self._fresh, self._beats = [], False, 0
        try:
            for event in events:
                if self._over or self._claim is not None:
                    break
                self._take(event)
        except _Stop as stop:
            return self._step(End.INTERRUPTED, stop.reason, stop.text)
        except Mismatch as mismatch:
            return self._step(End.MISMATCH, Reason.MISMATCH, str(mismatch))
        if self._claim is not None:
            return self._step(End.CLAIMED, Reason.ABORT, "the engine gave the request up")
        return self._step(End.FINISHED if self._over else End.GOES_ON, Reason.EOF, "")

    def confirm(self) -> Step:
        """The claimed ending is one: what the client lacks of it."""
        self._out = []
        if self._claim is not None:
            self._end(*self._claim)
        return Step(b"".join(self._out), End.FINISHED, fresh=True)

    def end_of_stream(self) -> Step:
        """The worker's stream has ended: in good order only if its last event was there or can be added."""
        if self._over:
            return Step(b"", End.FINISHED)
        if self.may_close():
            return Step(self.close(), End.FINISHED, fresh=True)
        if self._opaque:
            return Step(b"", End.FINISHED)
        return Step(b"", End.INTERRUPTED, reason=Reason.EOF, text="the worker's stream ended before the answer did")

    def may_close(self) -> bool:
        """Whether all that is missing is the same for every engine."""
        return not self._over and self._dialect.formality_after(self._transcript.last_key) is not None

    def may_finish(self, journal: Sequence[int]) -> bool:
        """Only an engine can write an ending that was not seen."""
        return False

    def close(self, finish: str | None = None) -> bytes:
        """The rest of the ending, after `may_close`."""
        self._over = True
        return self._dialect.formality_after(self._transcript.last_key) or b""

    def failing(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own, as the last event of this stream."""
        return self._dialect.error_event(kind, code, message, self._sequence)

    def _step(self, end: End, reason: Reason, text: str) -> Step:
        return Step(b"".join(self._out), end, self._fresh, self._beats, reason, text)

    def _take(self, event: Event) -> None:
        if event.data is None:
            self._out.append(event.raw)
            return
        piece = self._dialect.read(event)
        if piece is None:
            self._take_opaque(event)
            return
        match piece.role:
            case Role.ERROR:
                self._take_error(event, piece)
            case Role.ABORTED:
                raise _Stop(Reason.ABORT, "the engine gave the request up")
            case Role.IDLE:
                if not self._replaying:
                    self._out.append(event.raw)
            case Role.TEXT:
                self._take_text(event, piece)
            case Role.FRAME | Role.CLOSES:
                self._take_frame(event, piece)
            case Role.ENDS:
                self._take_end(event, piece)

    def _take_opaque(self, event: Event) -> None:
        if self._replaying:
            raise _Stop(Reason.ENGINE_ERROR, "a replay holds an event that is not understood")
        self._release()
        self._opaque = self._fresh = True
        self._out.append(event.raw)

    def _take_error(self, event: Event, piece: Piece) -> None:
        own_fault = piece.status is not None and 400 <= piece.status < 500
        if own_fault and self._attempts == 1 and not self._transcript.has_text:
            # The request's own fault: another worker would say the same.
            self._out.append(event.raw)
            self._over = True
            return
        raise _Stop(Reason.ENGINE_ERROR, f"the engine reported an error: {piece.text}")

    def _take_text(self, event: Event, piece: Piece) -> None:
        self._beats += 1
        known = 0
        if self._replaying:
            known = self._transcript.text_known(piece)
            self._replaying = not self._transcript.caught_up()
            if known == len(piece.text):
                return
        self._release()
        rest = piece if not known else Piece(Role.TEXT, piece.key, piece.text[known:], piece.sequence)
        if rest.text:
            self._transcript.enter(rest)
            self._fresh = True
        self._send(event, piece, known)

    def _take_frame(self, event: Event, piece: Piece) -> None:
        if self._replaying:
            known = self._transcript.frame_known(piece)
            if known is not None:
                self._names |= zip(self._dialect.names(event.data or b""), _values(known), strict=False)
                self._replaying = not self._transcript.caught_up()
                return
        if piece.role is Role.CLOSES:
            self._held.append((event, piece))
            return
        self._release()
        self._enter_frame(event, piece)

    def _take_end(self, event: Event, piece: Piece) -> None:
        if self._replaying:
            raise Mismatch(f"{piece.key} comes before the end of what the client has")
        if self._dialect.hides_aborts:
            self._claim = (event, piece)
        else:
            self._end(event, piece)

    def _end(self, event: Event, piece: Piece) -> None:
        self._release()
        self._send(event, piece)
        self._over = self._fresh = True

    def _release(self) -> None:
        """Hand out the closing frames that were held back: what follows has proven them."""
        held, self._held = self._held, []
        for event, piece in held:
            self._enter_frame(event, piece)

    def _enter_frame(self, event: Event, piece: Piece) -> None:
        # Only frames that begin something hold names, and the first stream's are kept.
        names = self._dialect.names(event.data or b"") if piece.role is Role.FRAME else ()
        self._transcript.enter(piece, tuple((name, self._names.get((name, value), value)) for name, value in names))
        self._send(event, piece)

    def _send(self, event: Event, piece: Piece, known: int = 0) -> None:
        if self._attempts == 1:
            if piece.sequence is not None:
                self._sequence = piece.sequence + 1
            self._out.append(event.raw)
            return
        edit = Edit(known, self._names, self._sequence)
        if piece.sequence is not None:
            self._sequence += 1
        self._out.append(self._dialect.edited(event, edit))


def _values(names: tuple[Name, ...]) -> tuple[str | int, ...]:
    return tuple(value for _, value in names)
