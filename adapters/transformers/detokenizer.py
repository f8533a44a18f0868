"""From token ids to text while they come: incremental detokenizer and stop strings. Pure.

Owns what a stream may say already. Invariants: the concatenation of everything returned is the text of all tokens (up
to a stop string), however the tokens arrive; half a character is never returned; text that may be the beginning of a
stop string is held back until it is known not to be. Both are rebuilt by pushing the old tokens again.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first output token is decoded with: tokenizers that put the space in front of a word
# would drop the first one otherwise.
CONTEXT_TOKENS = 6
# A character has at most four bytes, so four byte tokens. Text that still ends in U+FFFD after these many tokens is no
# unfinished character but bytes that are none, and would be held back for ever.
HELD_TOKENS_MAX = 16

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns tokens into text, one at a time."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._prefix_text = decode(context)
        if self._prefix_text.endswith(REPLACEMENT):
            # A prompt that ends inside a character: without it the output begins with what is left of it, and no text
            # of the prompt can be taken for output.
            context, self._prefix_text = [], ""
        self._ids = context
        self._read = len(context)

    def push(self, token: int) -> str:
        """The text that this token completes; "" while it is within a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._read
        if (text.endswith(REPLACEMENT) or len(text) <= len(self._prefix_text)) and held < HELD_TOKENS_MAX:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """What is held back, as it is: nothing will complete it any more."""
        if self._read == len(self._ids):
            return ""
        return self._release(self._decode(self._ids))

    def _release(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)
        return new


class StopMatcher:
    """Finds the stop string that ends first, across any split of the text."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        # The newest text that may be the beginning of a stop string, and how much of it was returned already.
        self._tail = ""
        self._returned = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent now, the stop string that was found or None). After a find, nothing more comes."""
        buffer = self._tail + text
        found = self._first(buffer)
        if found is not None:
            end, stop = found
            upto = end if self._include else end - len(stop)
            # What was returned of the buffer already (only with include) lies before the end of the stop string.
            return buffer[self._returned : max(upto, self._returned)], stop
        keep = self._open_prefix(buffer)
        cut = len(buffer) - keep
        ready = buffer[self._returned :] if self._include else buffer[self._returned : cut]
        self._tail = buffer[cut:]
        self._returned = keep if self._include else 0
        return ready, None

    def pass_by(self, text: str) -> str:
        """Text in which no stop string counts (before `min_tokens`): all of it may be sent."""
        ready = self._tail[self._returned :] + text
        self._tail, self._returned = "", 0
        return ready

    def flush(self) -> str:
        """What is held back, at an end that no stop string made."""
        return self.pass_by("")

    def _first(self, buffer: str) -> tuple[int, str] | None:
        """(end, stop) of the occurrence that ends first; of several, the longest."""
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop)
            if at < 0:
                continue
            end = at + len(stop)
            if found is None or (end, -len(stop)) < (found[0], -len(found[1])):
                found = (end, stop)
        return found

    def _open_prefix(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
