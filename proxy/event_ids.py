"""The ids of a stream's events, by which a client can say which of them it has. Pure: chance is an argument.

An id is `<token>.<n>`. The token names the stream to whoever holds it: 128 random bits, behind the prefix of the node
where they are in a fleet (`<prefix>~<random>`). n counts the stream's events as they stand on the wire, from 1 on:
whatever ends in an empty line is one, whether it carries tokens, a role, counts, an error, `[DONE]` or no data at all,
an engine's comment or the trailer; of several choices in one stream, those of the stream. Outputs would not do: an
event can hold many of them or none. Only the comments that bridge a wait are none: they are their connection's and not
the stream's. Invariant: an event's id is in its last line before its empty line, so a client that drops what follows
the last empty line it has, and asks for what follows the last id in the rest, gets exactly what it lacks.
"""

import base64
import re

from .sse import split_events, with_id

TOKEN_BYTES = 16
PREFIX_MARK = "~"
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]{1,64}~)?[A-Za-z0-9_-]{22}")
_LF = 0x0A
_POSITION = re.compile(r"[0-9]{1,15}")


def new_token(random: bytes, prefix: str = "") -> str:
    """The name of a new stream, of so many bytes that nobody can guess."""
    name = base64.urlsafe_b64encode(random[:TOKEN_BYTES]).rstrip(b"=").decode()
    return f"{prefix}{PREFIX_MARK}{name}" if prefix else name


def is_token(text: str) -> bool:
    """Whether a text could name a stream."""
    return _TOKEN.fullmatch(text) is not None


def prefix_of(token: str) -> str:
    """Where in a fleet the stream is; "" where there is none."""
    return token.rpartition(PREFIX_MARK)[0]


def parse_position(text: str) -> int | None:
    """The number of an event; 0 is before the first."""
    return int(text) if _POSITION.fullmatch(text) else None


def parse_id(text: str) -> tuple[str, int] | None:
    """Token and number of an event's id; None if it is none of ours."""
    token, _, number = text.rpartition(".")
    position = parse_position(number)
    return (token, position) if position is not None and is_token(token) else None


class Numbering:
    """Numbers what one stream says."""

    __slots__ = ("_line", "last")

    def __init__(self, token: str) -> None:
        self._line = f"id: {token}.".encode()
        self.last = 0

    def take(self, data: bytes) -> list[bytes]:
        """Whole events, each under its id."""
        if data.find(b"\n\n") == len(data) - 2 > 0 and data[0] != _LF and b"\r" not in data:
            # What nearly all writes hold: one event.
            self.last += 1
            return [b"%b%b%d\n\n" % (data[:-1], self._line, self.last)]
        out = []
        for raw in split_events(data):
            self.last += 1
            out.append(with_id(raw, b"%b%d" % (self._line, self.last)))
        return out


class Counting:
    """Counts what one stream says that is numbered elsewhere."""

    __slots__ = ()

    def take(self, data: bytes) -> list[bytes]:
        """Whole events, as they are."""
        return split_events(data)
