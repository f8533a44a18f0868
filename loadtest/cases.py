"""What a soak tries: which request, killed where and how. Pure: chance is an argument.

Owns the sweep. Invariant: the same seed draws the same cases, and each list (victims, cuts, samplings, paths) is gone
through evenly, in an order of its own, so that a short soak misses nothing that a long one would have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

from .harness import Victim

_T = TypeVar("_T")


class Way(StrEnum):
    """From where a killed session goes on."""

    HELD = "held"
    IN_PLACE = "in-place"
    DISK = "disk"


class Cut(StrEnum):
    """Where in an answer its worker is killed. Edges are those of KV blocks, counted in positions."""

    FIRST = "first"
    EDGE_BEFORE = "edge-1"
    EDGE = "edge"
    EDGE_AFTER = "edge+1"
    LAST_BUT_ONE = "last-1"
    LAST = "last"


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 23, "presence_penalty": 0.6, "frequency_penalty": 0.3},
}
# Of different lengths, so that edges of blocks lie elsewhere in each answer, and each with a secret of its own.
PROMPTS = (
    "Once upon a time",
    "The secret word is walrus. Tell me what you know about",
    "Write a long story about a dog named Max who travels the world. His password is 4711.",
    "Count: one, two, three",
    "An emoji 🎉 for each of my seven cats, whose names are",
    "Explain why the sea is salt, slowly, and mention " + "the number 17, " * 12,
)
PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Request:
    """One request; equal requests have equal answers."""

    path: str
    prompt: str
    sampling: str
    max_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        """What is sent."""
        said: dict[str, Any] = {"prompt": self.prompt}
        if self.path == PATHS[1]:
            said = {"messages": [{"role": "user", "content": self.prompt}]}
        return {"model": model, "max_tokens": self.max_tokens, **SAMPLINGS[self.sampling], **said}

    @property
    def kind(self) -> str:
        """`chat` or `completions`."""
        return "chat" if self.path == PATHS[1] else "completions"


@dataclass(frozen=True, slots=True)
class Case:
    """One kill: the first request is the one that is watched, the others run beside it."""

    way: Way
    victim: Victim
    cut: Cut
    requests: tuple[Request, ...]
    edge: int

    @property
    def watched(self) -> Request:
        """The request whose cut is chosen."""
        return self.requests[0]

    def cut_at(self, prompt_len: int, output_count: int, block_tokens: int) -> int:
        """After how many of its outputs the worker is killed, at least 1 and at most all."""
        edges = [o for o in range(1, output_count) if (prompt_len + o) % block_tokens == 0]
        edge = edges[self.edge % len(edges)] if edges else output_count // 2
        if self.way is Way.DISK and edges:
            # A snapshot takes a moment: an edge of the first half would always come too early.
            late = edges[len(edges) // 2 :]
            edge = late[self.edge % len(late)]
        chosen = {
            Cut.FIRST: 1,
            Cut.EDGE_BEFORE: edge - 1,
            Cut.EDGE: edge,
            Cut.EDGE_AFTER: edge + 1,
            Cut.LAST_BUT_ONE: output_count - 1,
            Cut.LAST: output_count,
        }[self.cut]
        return min(max(chosen, 1), output_count)


def draw(
    seed: int, way: Way, *, streams: int, max_tokens: int, victims: Sequence[Victim] = tuple(Victim)
) -> Iterator[Case]:
    """Cases without end: kills of workers that write `streams` answers of `max_tokens` tokens each."""
    chance = Random(f"{seed}/{way}")
    dying = _rounds(chance, victims)
    cuts = _rounds(chance, list(Cut))
    samplings = _rounds(chance, list(SAMPLINGS))
    paths = _rounds(chance, PATHS)
    while True:
        prompts = chance.sample(PROMPTS, min(streams, len(PROMPTS)))
        requests = tuple(Request(next(paths), prompt, next(samplings), max_tokens) for prompt in prompts)
        yield Case(way, next(dying), next(cuts), requests, chance.randrange(1_000))


def _rounds(chance: Random, of: Sequence[_T]) -> Iterator[_T]:
    """Each of a list once, in some order, then all of them again in another."""
    while True:
        yield from chance.sample(of, len(of))
