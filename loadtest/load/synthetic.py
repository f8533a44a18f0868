"""Prompts made up from a seed, each of about as many tokens as are wanted. Pure: who counts tokens is an argument.

Invariant: the same seed makes the same prompts, and no two of them begin alike, so that no prefix cache helps.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

Count = Callable[[str], Awaitable[int]]

TRIES = 6
_VOCABULARY = """
the a of and to in is was he for it with as his on be at by had not are but from or have they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years where much your way down should because
long each just state people those too mr how little good world make very year still see own work men day get
here old life both between being under three never know same last another while us might great go come since
against right came take used himself few house use place during high without again home around small however
found part school every don got united left number course war until always away something fact water though
"""
_WORDS = tuple(_VOCABULARY.split())


def text_of(words: int, index: int, seed: int) -> str:
    """A text of so many words. A longer one begins with the shorter one of the same index."""
    chance = Random(f"{seed}/prompt/{index}")
    said = [f"Story {chance.randrange(10**9):09d}."]
    said += [chance.choice(_WORDS) for _ in range(max(words, 0))]
    return " ".join(said)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the engine's tokenizer: tokens of our first words, and of each further one.

    `count` counts exactly; it is None where the engine cannot be asked.
    """

    first: float
    per_word: float
    count: Count | None


async def prompt_of(wanted: int, index: int, seed: int, tokens: Tokens) -> str:
    """A prompt of `wanted` tokens: exactly, or as near as whole words come, where they can be counted."""
    words = max(round((wanted - tokens.first) / tokens.per_word), 0)
    best: tuple[int, str] | None = None
    for _ in range(TRIES):
        text = text_of(words, index, seed)
        if tokens.count is None:
            return text
        off = wanted - await tokens.count(text)
        if best is None or abs(off) < best[0]:
            best = (abs(off), text)
        if off == 0:
            break
        step = round(off / tokens.per_word)
        words = max(words + (step or (1 if off > 0 else -1)), 0)
    assert best is not None
    return best[1]
