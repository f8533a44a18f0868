"""A request for several answers as requests for one each. Pure.

Owns the numbering of the choices (as in vLLM: the prompt's index times `n`, plus the choice's), their seeds and bodies.
Invariant: the parts together ask for exactly what the request asks for, and each is a request that an engine that
knows neither `n` nor several prompts could take. What it does not understand it leaves whole: to judge that is the
engine's business. It does not send requests, and does not put answers together (`choices_merge` does).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .request import NO_SEED

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One choice: its place in the answer, whose prompt it answers, and the request for it alone."""

    index: int
    prompt: int
    body: Body


def count_of(body: Body, *, chat: bool) -> int:
    """How many choices a request asks for; 1 where that is not clear."""
    n = _n(body)
    return 1 if n is None else n * len(_prompts(body, chat=chat))


def single(body: Body, *, chat: bool) -> Body:
    """The request for the first of a request's choices."""
    return body if count_of(body, chat=chat) == 1 else next(_parts(body, chat=chat)).body


def split(body: Body, *, chat: bool) -> tuple[Part, ...]:
    """The parts of a request, in the order of their choices; the request itself where it asks for one answer."""
    if count_of(body, chat=chat) == 1:
        return (Part(0, 0, body),)
    return tuple(_parts(body, chat=chat))


def _parts(body: Body, *, chat: bool) -> Iterator[Part]:
    n = _n(body) or 1
    single = {name: value for name, value in body.items() if name != "n"}
    for index, prompt in enumerate(_prompts(body, chat=chat)):
        asked = single if prompt is None else {**single, "prompt": prompt}
        for choice in range(n):
            yield Part(index * n + choice, index, _seeded(asked, choice))


def _seeded(body: Body, choice: int) -> Body:
    """vLLM's rule (v1/engine/parallel_sampling.py): choice i of each prompt samples with the request's seed plus i."""
    seed = body.get("seed")
    if not choice or type(seed) is not int or seed in NO_SEED:
        return body
    return {**body, "seed": seed + choice}


def _n(body: Body) -> int | None:
    """How many choices a prompt is to have; None where that is not understood."""
    n = body.get("n")
    if n is None:
        return 1
    return n if type(n) is int and n > 0 else None


def _prompts(body: Body, *, chat: bool) -> list[list[Any] | None]:
    """The prompts of a list of several (all texts, or all lists of ids), each as a list of one; else one None.

    A list of one and not the prompt alone: engines look at these less strictly (an empty text).
    """
    prompt = None if chat else body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2:
        return [None]
    understood = all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt)
    return [[item] for item in prompt] if understood else [None]


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)
