"""Server-sent events as bytes: an incremental parser and an encoder. No I/O.

Invariant: what a parser returns depends on the bytes alone, never on how they were split; and the raw bytes of all
events plus `tail` are exactly the bytes that were fed, so an event that nobody changes can be forwarded byte for
byte. It does not know what the data of an event means (dialects/ does), and never holds more than `buffer_bytes_max`.
"""

import re
from itertools import pairwise

import msgspec

from ..session.errors import EngineError

BUFFER_BYTES_MAX = 8 << 20

# An event ends at an empty line. The groups are atomic: a CRLF must never be taken for two line ends.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event: its bytes as they came, and its fields. `data` is None where there was no data (comments).

    A struct and not a dataclass, because one is made for every token of every stream.
    """

    raw: bytes
    data: bytes | None
    name: str = ""
    id: str = ""


class SseParser:
    """Bytes in, events out. Raises EngineError when one event is larger than the bound."""

    def __init__(self, buffer_bytes_max: int = BUFFER_BYTES_MAX) -> None:
        self._buffer_bytes_max = buffer_bytes_max
        self._buffer = bytearray()
        self._scan_from = 0
        self._at_start = True

    @property
    def tail(self) -> bytes:
        """Bytes of an event that has not ended yet."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Event]:
        """Take bytes and return the events that they complete, in order."""
        if self._buffer or b"\r" in data or self._at_start:
            return self._feed_slowly(data)
        if data.count(b"\n") == 2 and data.endswith(b"\n\n") and data.startswith(b"data: "):
            return [Event(data, data[6:-2])]
        # The usual reads of an engine's stream are one event, or several: each ends in two line feeds.
        blocks = data.split(b"\n\n")
        rest = blocks.pop()
        events = [
            Event(block + b"\n\n", block[6:])
            if block.startswith(b"data: ") and b"\n" not in block
            else _event(block + b"\n\n")
            for block in blocks
        ]
        if rest:
            self._keep(rest)
        return events

    def finish(self) -> list[Event]:
        """The stream has ended: a last event without its empty line counts as one."""
        raw, self._buffer, self._scan_from = bytes(self._buffer), bytearray(), 0
        # A single CR at the very end was held back for the LF that could have followed.
        return [_event(raw, bom=self._take_start())] if raw else []

    def _feed_slowly(self, data: bytes) -> list[Event]:
        buffer = self._buffer
        buffer += data
        events: list[Event] = []
        start = 0
        while match := _EVENT_END.search(buffer, max(start, self._scan_from)):
            end = match.end()
            if end == len(buffer) and buffer[end - 1] == 0x0D:
                break  # the LF of a CRLF may still come; it would belong to this event
            events.append(_event(bytes(buffer[start:end]), bom=self._take_start()))
            start = self._scan_from = end
        del buffer[:start]
        # The longest beginning of an event's end that can lie at the end of the buffer is CRLF CR.
        self._scan_from = max(0, len(buffer) - 3)
        if buffer:
            self._check()
        return events

    def _take_start(self) -> bool:
        at_start, self._at_start = self._at_start, False
        return at_start

    def _keep(self, rest: bytes) -> None:
        self._buffer += rest
        self._scan_from = max(0, len(rest) - 3)
        self._check()

    def _check(self) -> None:
        if len(self._buffer) > self._buffer_bytes_max:
            raise EngineError(
                f"the engine sent an event of more than {self._buffer_bytes_max} bytes, the most that is kept: "
                "ask for less in one event, as with fewer logprobs"
            )


def _event(raw: bytes, *, bom: bool = False) -> Event:
    """Read one event's fields from its lines."""
    lines = _LINE_END.split(raw.removeprefix(_BOM) if bom else raw)
    data: list[bytes] = []
    name = identifier = ""
    for line in lines:
        if not line or line.startswith(b":"):
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"id" and b"\0" not in value:
            identifier = value.decode("utf-8", "replace")
    return Event(raw, b"\n".join(data) if data else None, name, identifier)


def split_events(data: bytes) -> list[bytes]:
    """Bytes that hold whole events, cut after each of them; what lacks its empty line at the very end counts as one."""
    cuts = [0, *(found.end() for found in _EVENT_END.finditer(data))]
    if cuts[-1] != len(data):
        cuts.append(len(data))
    return [data[start:end] for start, end in pairwise(cuts)]


def with_id(raw: bytes, id_line: bytes) -> bytes:
    """One event under another id: a line after its own ones, so that it is the one that counts."""
    # Empty lines before it mean nothing, and would look like a part of the end of the event before.
    raw = raw.lstrip(b"\r\n")
    end = _EVENT_END.search(raw)
    if end is None:
        return raw + (b"" if not raw or raw.endswith((b"\n", b"\r")) else b"\n") + id_line + b"\n\n"
    line_end = 2 if end.group().startswith(b"\r\n") else 1
    return raw[: end.start() + line_end] + id_line + b"\n\n"


def encode_event(data: bytes) -> bytes:
    """An event that carries `data`; line ends in it become further data lines."""
    if b"\n" not in data and b"\r" not in data:
        return b"data: " + data + b"\n\n"
    return b"".join(b"data: " + line + b"\n" for line in _LINE_END.split(data)) + b"\n"


def encode_comment(text: str) -> bytes:
    """A comment: keeps a connection alive, and no reader takes it for content."""
    return b": " + _LINE_END.sub(b" ", text.encode()) + b"\n\n"
