"""Where answers are cut and how: the plan of a verification. Pure: chance is an argument.

Owns the choice of cuts and ways. Invariant: the same seed makes the same plan, and kills and ways are spread evenly
over prompts and cuts, so that a few kills miss no place that many would have met.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Way(StrEnum):
    """How an answer is interrupted, and from where it goes on."""

    KILL = "kill"  # a real SIGKILL of the worker; from the memory that it left behind
    MOVE = "move"  # a planned move; from the live pool
    DISK = "disk"  # a planned move; from a snapshot in the store


class Place(StrEnum):
    """Where in an answer it is cut."""

    FIRST = "first"
    EARLY = "early"
    MIDDLE = "middle"
    LAST_BUT_ONE = "last-1"


# Those that a few cuts should not miss come first.
_IMPORTANT = (Place.MIDDLE, Place.FIRST, Place.LAST_BUT_ONE, Place.EARLY)
_ORDER = tuple(Place)


@dataclass(frozen=True, slots=True)
class Task:
    """One interruption to come. `column` names the cut in tables; `lag`: tokens that a snapshot is behind it."""

    prompt: int
    column: str
    way: Way
    lag: int


def columns(count: int) -> tuple[str, ...]:
    """The names of `count` cuts, in the order in which they lie in an answer (any further ones lie anywhere)."""
    chosen = _IMPORTANT[:count]
    return (*(p.value for p in _ORDER if p in chosen), *(f"any-{i}" for i in range(1, count - len(_IMPORTANT) + 1)))


def plan(seed: int, prompts: int, cuts: int, ways: Sequence[Way], kill_share: float) -> tuple[Task, ...]:
    """A task for each prompt and cut. Kills are a share of all tasks; the other ways share the rest evenly.

    Where nothing but kills is asked for, every task is one.
    """
    chance = Random(f"{seed}/ways")
    names = columns(cuts)
    cells = [(prompt, column) for prompt in range(prompts) for column in range(len(names))]
    gentle = [way for way in ways if way is not Way.KILL]
    kills = len(cells) if not gentle else round(kill_share * len(cells)) if Way.KILL in ways else 0
    if kill_share > 0 and Way.KILL in ways and cells:
        kills = max(kills, 1)
    killed = set(_spread(chance, prompts, len(names), kills))
    tasks = []
    for prompt, column in cells:
        # A diagonal pattern: each prompt and each cut meets every way.
        way = Way.KILL if (prompt, column) in killed else gentle[(prompt + column) % len(gentle)]
        tasks.append(Task(prompt, names[column], way, chance.randrange(0, 17)))
    return tuple(tasks)


def place(task: Task, length: int, seed: int) -> int:
    """After how many of an answer's `length` tokens it is cut: at least 1, and before the last where there are two."""
    chance = Random(f"{seed}/{task.prompt}/{task.column}")
    last = max(length - 1, 1)
    match task.column:
        case Place.FIRST:
            at = 1
        case Place.EARLY:
            at = chance.randint(2, max(2, length // 4))
        case Place.MIDDLE:
            at = chance.randint(length // 3 + 1, max(length // 3 + 1, 2 * length // 3))
        case Place.LAST_BUT_ONE:
            at = last
        case _:
            at = chance.randint(1, last)
    return min(at, last)


def _spread(chance: Random, prompts: int, cuts: int, count: int) -> list[tuple[int, int]]:
    """`count` cells: every cut in turn, and no prompt twice before all had their turn."""
    chosen: list[tuple[int, int]] = []
    taken: set[tuple[int, int]] = set()
    rows: list[int] = []
    while len(chosen) < min(count, prompts * cuts):
        column = len(chosen) % cuts
        if not rows:
            rows = chance.sample(range(prompts), prompts)
        row = next((r for r in rows if (r, column) not in taken), None)
        if row is None:
            # All that are left in this round had this cut already: another round begins.
            rows = [r for r in chance.sample(range(prompts), prompts) if (r, column) not in taken]
            row = rows[0]
        rows.remove(row)
        taken.add((row, column))
        chosen.append((row, column))
    return chosen
