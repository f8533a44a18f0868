"""Which splicer a stream gets, and what every splicer does. Pure."""

from collections.abc import Sequence
from typing import Protocol

from .dialects.generate import Generate
from .splice import Splicer, Step, Wishes
from .splice_events import EventSplicer
from .splice_generate import GenerateSplicer
from .sse import Event


class AnySplicer(Protocol):
    """Splices one stream: `begin` for each attempt, then `feed` for what is read of it, then `end_of_stream`."""

    @property
    def knows_ids(self) -> bool:
        """Whether ids tell what of a replay was journaled; if not, whatever is new may be the new owner's own."""
        ...

    @property
    def delivered(self) -> tuple[int, ...]:
        """The output ids that the client has; none where they are not seen."""
        ...

    @property
    def opaque(self) -> bool:
        """Whether something was forwarded that cannot be accounted for: the stream cannot change workers any more."""
        ...

    @property
    def untouched(self) -> bool:
        """Whether the client has nothing of an answer yet."""
        ...

    def begin(self, expected: Sequence[int] = ()) -> str | None:
        """A new attempt. Returns what is wrong with it already, if anything."""
        ...

    def feed(self, events: Sequence[Event]) -> Step:
        """Account for events of the current attempt and return what of them the client lacks."""
        ...

    def confirm(self) -> Step:
        """After End.CLAIMED: it was an end, and this is what the client lacks of it."""
        ...

    def end_of_stream(self) -> Step:
        """The worker's stream has ended."""
        ...

    def may_close(self) -> bool:
        """Whether only formalities are missing, which `close` writes."""
        ...

    def may_finish(self, journal: Sequence[int]) -> bool:
        """Whether the client has all of a finished `journal`, so that `close` can write its ending."""
        ...

    def close(self, finish: str | None = None) -> bytes:
        """The rest of the ending in the stream's own form."""
        ...

    def failing(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own, as the last event of this stream."""
        ...


def splicer_of(wishes: Wishes) -> AnySplicer:
    """The splicer for a stream of what the client asked for."""
    match wishes.events:
        case None:
            return Splicer(wishes)
        case Generate():
            return GenerateSplicer()
        case events:
            return EventSplicer(events)
