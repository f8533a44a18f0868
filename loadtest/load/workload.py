"""What is asked: each request of a run, drawn once and sent alike in every strategy.

Owns the requests and how they are made of a data set or of synthetic prompts. Invariant: equal seeds and settings make
equal requests. It does not decide when they are sent (`arrivals.py`, `drive.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ...session.errors import ConfigError
from .arrivals import Arrival
from .dataset import Entry
from .lengths import Lengths
from .synthetic import Tokens, prompt_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `output_tokens` is the most that it may bring."""

    index: int
    path: str
    body: dict[str, Any]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like; `extra` is put into each body, over everything else."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    chat: bool = False
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


async def draw_asks(
    count: int,
    shape: Shape,
    *,
    model: str,
    seed: int,
    tokens: Tokens,
    entries: Sequence[Entry] = (),
    arrivals: Sequence[Arrival] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Ask]:
    """`count` requests: from the data set, shuffled, if there is one; a trace's lengths go before the distributions."""
    chance = Random(f"{seed}/lengths")
    picks = Random(f"{seed}/dataset").sample(range(len(entries)), len(entries)) if entries else []
    asks = []
    for index in range(count):
        progress(f"prompt {index + 1} of {count}")
        wanted, outputs = shape.prompt_tokens.draw(chance), shape.output_tokens.draw(chance)
        told = arrivals[index % len(arrivals)] if arrivals else Arrival(0.0)
        wanted, outputs = told.prompt_tokens or wanted, told.output_tokens or outputs
        if entries:
            entry = entries[picks[index % len(picks)]]
            outputs = entry.output_tokens or outputs
        else:
            entry = Entry(prompt=await prompt_of(wanted, index, seed, tokens))
        asks.append(_ask(index, entry, outputs, shape, model, seed))
    return asks


def _ask(index: int, entry: Entry, outputs: int, shape: Shape, model: str, seed: int) -> Ask:
    body: dict[str, Any] = {"model": model, "max_tokens": outputs, "temperature": shape.temperature}
    if shape.ignore_eos:
        body["ignore_eos"] = True
    if shape.temperature > 0:
        # So that what is undisturbed and what is not are the same draw.
        body["seed"] = Random(f"{seed}/sampling/{index}").randrange(1 << 31)
    chat = shape.chat or bool(entry.messages)
    if chat:
        body["messages"] = list(entry.messages) or [{"role": "user", "content": entry.prompt}]
    else:
        body["prompt"] = entry.prompt
    body |= shape.extra
    most = body.get("max_completion_tokens", body["max_tokens"])
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"--extra-body: max_tokens is {most!r}; give a whole number of at least 1")
    return Ask(index, CHAT if chat else COMPLETIONS, body, most)
