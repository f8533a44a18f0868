"""What clients ask for, and what an undisturbed engine answers: each token is its own place and a digit. Pure.

A token is INDEX times its place among the outputs, plus a digit that depends on the prompt, the place, and on how many
positions before it hold KV that was prefilled again (*again*; 0 in an undisturbed run). So a token that is lost,
repeated or out of order shows by its place, one that was computed from recomputed KV by its digit, and one of another
session by both.
"""

from dataclasses import dataclass
from zlib import crc32

INDEX = 10
# A token's text has so many characters, so that a place in the text is a place among the tokens.
WIDTH = 6


@dataclass(frozen=True, slots=True)
class Question:
    """A client's request: `length` outputs in all, then `finish`."""

    number: int
    length: int
    finish: str
    prompt_len: int
    is_streamed: bool = True
    policy: str = "best-effort"
    wants_ids: bool = True

    @property
    def prompt(self) -> str:
        """The text by which an engine knows it."""
        return f"question {self.number}"


def token(question: Question, place: int, again: int) -> int:
    """The output at `place`."""
    return place * INDEX + crc32(b"%d/%d/%d" % (question.number, place, again)) % INDEX


def text(value: int) -> str:
    """A token as text."""
    return f"{value:0{WIDTH - 1}d} "


def undisturbed(question: Question) -> tuple[int, ...]:
    """The whole answer if nothing ever happens to it."""
    return tuple(token(question, place, 0) for place in range(question.length))
