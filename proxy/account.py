"""The account of one stream: which ids and which text the client was sent, and how far a worker's replay has come.

Invariant: `check_*` raise Mismatch before anything of a wrong replay is entered; what is entered was handed out. It
knows no bytes and no events: `splice` asks it what of a chunk is new.
"""

from array import array
from collections.abc import Sequence
from io import StringIO

from .dialects import openai
from .dialects.openai import Choice

_LATER_MAX = 64


class Mismatch(Exception):
    """A worker says something else than what was journaled or sent; the text says where."""


class Account:
    """What the client has (over all attempts), and what the current attempt has said so far."""

    __slots__ = ("_known", "_last_had_text", "_later", "_seen_chars", "_seen_ids", "_sent_ids", "_sent_text")

    def __init__(self) -> None:
        self._sent_ids = array("L")
        # Chunks that have not been entered yet: see `enter_later`.
        self._later: list[tuple[Sequence[int], str, str]] = []
        self._sent_text: dict[str, StringIO] = {}
        # Whether the newest tokens came with text: if not, their engine may still owe it (parsers that wait).
        self._last_had_text = False
        # Of the current attempt: the ids that it must say, and how far it has come.
        self._known: Sequence[int] = ()
        self._seen_ids = 0
        self._seen_chars: dict[str, int] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        """The output ids that the client has."""
        self._settle()
        return tuple(self._sent_ids)

    @property
    def token_count(self) -> int:
        """How many output ids the client has."""
        self._settle()
        return len(self._sent_ids)

    @property
    def is_empty(self) -> bool:
        """Whether the client has no token and no text yet."""
        self._settle()
        return not self._sent_ids and not self._sent_text

    @property
    def owes_text(self) -> bool:
        """Whether the newest tokens came without text, so that some of it may still be with their engine."""
        self._settle()
        return not self._last_had_text

    def begin(self, expected: Sequence[int]) -> None:
        """A new attempt, which must begin with the `expected` ids; Mismatch if the client has others."""
        sent = self.ids
        if any(a != b for a, b in zip(sent, expected, strict=False)):
            raise Mismatch(f"the journal differs from the {len(sent)} tokens that the client has")
        self._known = tuple(expected) if len(expected) >= len(sent) else sent
        self._seen_ids = 0
        self._seen_chars = {}

    def enter(self, ids: Sequence[int], added: Sequence[tuple[str, str]]) -> None:
        """Enter ids and text of a chunk that the client gets whole."""
        self._settle()
        self._enter(ids, added)

    def enter_later(self, ids: Sequence[int], key: str, text: str) -> None:
        """Enter a chunk with text in one field, as soon as anybody asks for the account.

        Between two tokens of a stream the processor's caches have forgotten this code, so that it costs many times as
        much for one chunk as for one of many.
        """
        self._later.append((ids, key, text))
        if len(self._later) >= _LATER_MAX:
            self._settle()

    def _settle(self) -> None:
        if self._later:
            later, self._later = self._later, []
            for ids, key, text in later:
                self._enter(ids, ((key, text),))

    def _enter(self, ids: Sequence[int], added: Sequence[tuple[str, str]]) -> None:
        self._sent_ids.extend(ids)
        if ids:
            self._last_had_text = bool(added)
        for key, text in added:
            account = self._sent_text.get(key)
            if account is None:
                account = self._sent_text[key] = StringIO(newline="")
            account.write(text)

    def enter_rest(self, choice: Choice, ids: Sequence[int], known_chars: dict[str, int]) -> None:
        """Enter what of a replayed chunk is new: `ids`, and the text behind what is known."""
        rest = [(key, text[known_chars.get(key, 0) :]) for key, text in joined_texts(choice).items()]
        self.enter(ids, [(key, text) for key, text in rest if text])

    def check_ids(self, ids: Sequence[int]) -> int:
        """Compare the next ids of the attempt with the journal; how many of them the client has."""
        known = self._known[self._seen_ids : self._seen_ids + len(ids)]
        for offset, (said, journaled) in enumerate(zip(ids, known, strict=False)):
            if said != journaled:
                raise Mismatch(f"token {self._seen_ids + offset + 1} is {said} where the journal has {journaled}")
        known_count = min(len(ids), max(0, len(self._sent_ids) - self._seen_ids))
        self._seen_ids += len(ids)
        return known_count

    def check_text(self, choice: Choice) -> dict[str, int]:
        """Compare the next text of each field with what the client has; how many characters of it the client has."""
        known: dict[str, int] = {}
        for key, text in joined_texts(choice).items():
            seen = self._seen_chars.get(key, 0)
            sent = self._sent_text.get(key)
            if sent is not None:
                sent.seek(seen)
                had = sent.read(len(text))
                sent.seek(0, 2)
                if not text.startswith(had):
                    raise Mismatch(f"the text of {key} differs from what the client has after character {seen}")
                known[key] = len(had)
            self._seen_chars[key] = seen + len(text)
        return known

    def check_complete(self, *, ended_by_text: bool) -> None:
        """An attempt may finish only past everything that the client has and the journal holds."""
        # A stop string ends an answer in the front end, when the core may already have journaled a few tokens more.
        needed = len(self._sent_ids) if ended_by_text else len(self._known)
        if self._seen_ids < needed:
            raise Mismatch(f"the worker finished after {self._seen_ids} tokens, {needed} are known")
        for key, sent in self._sent_text.items():
            if self._seen_chars.get(key, 0) < sent.tell():
                raise Mismatch(f"the worker finished before the end of the text of {key} that the client has")

    def caught_up(self) -> bool:
        """Whether the attempt has said all that is known: what follows is new."""
        return self._seen_ids >= max(len(self._known), len(self._sent_ids)) and all(
            self._seen_chars.get(key, 0) >= sent.tell() for key, sent in self._sent_text.items()
        )

    def tool_heads(self, choice: Choice) -> frozenset[int]:
        """Indices of the chunk's tool calls whose id and name the client has."""
        calls = choice.delta.tool_calls if choice.delta is not None else None
        return frozenset(call.index for call in calls or () if openai.tool_key(call.index, "name") in self._sent_text)


def joined_texts(choice: Choice) -> dict[str, str]:
    """The text of each field of a chunk; several deltas of one tool call count as one."""
    joined: dict[str, str] = {}
    for key, text in openai.texts(choice):
        joined[key] = joined.get(key, "") + text
    return joined
