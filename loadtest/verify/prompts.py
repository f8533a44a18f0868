"""What `verify` asks: the built-in prompts, and prompts of a user's own from a JSONL file.

Owns the forms in which a line may come (docs/verify.md). Invariant: every prompt is one streamed answer that ends by
itself, and has a name of its own. Pure but for `read_prompts`, which reads one file.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.errors import ConfigError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_TOKENS = 64
LINES_MAX = 10_000
FILE_BYTES_MAX = 256 << 20
NAME_MAX = 60
# What verify itself decides, or what makes more of an answer than one stream.
_OURS = ("stream", "stream_options", "return_token_ids", "model")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `optional` fields are left out where the engine refuses them, and the record says so."""

    name: str
    path: str
    body: Mapping[str, Any]
    optional: tuple[str, ...] = ()

    def without_optional(self) -> "Prompt":
        """The same request without what the engine may refuse."""
        kept = {k: v for k, v in self.body.items() if k not in self.optional}
        return Prompt(self.name, self.path, kept)


_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "top-k": {"temperature": 1.0, "top_k": 40, "min_p": 0.02, "seed": 4711},
    "penalties": {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    "seeded-penalties": {"temperature": 0.7, "seed": 23, "presence_penalty": 0.6, "repetition_penalty": 1.1},
    "min-tokens": {"temperature": 0.9, "seed": 11, "min_tokens": 40},
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_JSON = {
    "json-object": {"type": "json_object"},
    "json-schema": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}},
}
# What some engines refuse: a grammar where none is built in, min_p where draws are to depend on nothing else.
_OPTIONAL = ("response_format", "min_p")
_NOTES = " ".join(
    f"Day {day}: the ship made {day * 7 % 90 + 20} miles, the cook served dish number {day * 3 % 17}, and sailor "
    f"{'ABCDEFG'[day % 7]} kept the watch."
    for day in range(1, 13)
)

# name, chat or not, sampling, text
_BUILT_IN: tuple[tuple[str, bool, str, str], ...] = (
    ("story", True, "greedy", "Write a long story about a dog named Max who travels the world."),
    ("story-seeded", True, "seeded", "Write a story about a lighthouse keeper who collects storms."),
    ("fairy-tale", False, "top-k", "Once upon a time, in a country without a king,"),
    ("count", False, "greedy", "Count in words: one, two, three,"),
    ("alphabet", False, "penalties", "The letters of the alphabet, each with an animal: A ape, B bear,"),
    ("explain", True, "penalties", "Explain why the sea is salt, as if to a child of eight."),
    ("argue", True, "seeded-penalties", "Give three arguments for, and three against, keeping cats indoors."),
    ("secret", True, "greedy", "The secret word is walrus. Tell me all that you know about it, and never stop early."),
    ("python", True, "greedy", "Write a Python function that merges two sorted lists, with a docstring."),
    ("python-go-on", False, "greedy", "def fibonacci(n: int) -> int:\n    "),
    ("rust", True, "seeded", "Write a Rust program that counts the words of a file."),
    ("sql", False, "greedy", "-- The ten customers with the highest turnover of last year\nSELECT"),
    ("shell", True, "top-k", "A one-line shell command that finds the ten largest files below a folder, explained."),
    ("html", False, "seeded-penalties", "<!doctype html>\n<html lang='en'>\n<head>\n<title>"),
    ("arithmetic", True, "greedy", "What is 17 * 23 + 4? Show each step."),
    ("emoji", False, "greedy", "An emoji 🎉 for each of my seven cats, whose names are"),
    ("emoji-chat", True, "seeded", "Answer only with emoji: how was your day? 🌧️🚲☕"),
    ("german", True, "greedy", "Erzähle mir in drei Sätzen, warum der Himmel blau ist."),
    ("french", True, "seeded", "Écris un court poème sur la mer en hiver."),
    ("spanish", False, "penalties", "Érase una vez un relojero que nunca llegaba a tiempo porque"),
    ("chinese", True, "greedy", "请用中文写一段关于春天的短文。"),
    ("japanese", True, "seeded", "日本の四季について、三つの文で説明してください。"),
    ("arabic", True, "top-k", "اكتب فقرة قصيرة عن القهوة."),
    ("hindi", False, "greedy", "एक समय की बात है, एक छोटे से गाँव में"),
    ("russian", True, "seeded-penalties", "Расскажи коротко о самом большом озере в мире."),  # noqa: RUF001
    ("long", True, "greedy", f"{_NOTES}\n\nSummarise the voyage, and name the day with the fewest miles."),
    ("long-go-on", False, "seeded", f"{_NOTES} Day 13:"),
    ("json-object", True, "json-object", "Describe a person as a JSON object with name, age and city."),
    ("json-schema", True, "json-schema", "Describe another person as a JSON object with name, age and city."),
    ("at-least-forty", True, "min-tokens", "Say hello, and then keep talking about the weather."),
)


def built_in(max_tokens: int = MAX_TOKENS) -> tuple[Prompt, ...]:
    """Thirty requests: chat and completions, greedy, seeded and with penalties; languages, code, emoji, JSON, long."""
    return tuple(_built(*line, max_tokens) for line in _BUILT_IN)


def _built(name: str, chat: bool, sampling: str, text: str, max_tokens: int) -> Prompt:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if sampling in _JSON:
        settings: dict[str, Any] = {"temperature": 0, "response_format": _JSON[sampling]}
    else:
        settings = dict(_SAMPLINGS[sampling])
    if "min_tokens" in settings:
        settings["min_tokens"] = min(settings["min_tokens"], max_tokens)
    optional = tuple(field for field in _OPTIONAL if field in settings)
    return Prompt(name, CHAT if chat else COMPLETIONS, {**settings, "max_tokens": max_tokens, **said}, optional)


def read_prompts(file: Path, max_tokens: int = MAX_TOKENS) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file. ConfigError names the line and what is wrong with it, for every wrong line."""
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{file}: larger than {FILE_BYTES_MAX} bytes; verify a part of it")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}; give a JSONL file with one request a line") from error
    return parse_prompts(text.splitlines(), str(file), max_tokens)


def parse_prompts(lines: Iterable[str], source: str, max_tokens: int = MAX_TOKENS) -> tuple[Prompt, ...]:
    """As `read_prompts`, from lines that are there already."""
    prompts: list[Prompt] = []
    mistakes: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(prompts) >= LINES_MAX:
            raise ConfigError(f"{source}: more than {LINES_MAX} prompts; verify a part of them")
        try:
            prompts.append(_prompt(json.loads(line), number, max_tokens))
        except ValueError as error:
            mistakes.append(f"{source}:{number}: {error}")
    if mistakes:
        shown = "\n".join(mistakes[:20])
        raise ConfigError(f"{shown}\n{len(mistakes)} wrong lines; docs/verify.md shows the forms that a line may have")
    if not prompts:
        raise ConfigError(f"{source}: no prompts; give one JSON object a line")
    return _with_names_of_their_own(prompts)


def _prompt(line: object, number: int, max_tokens: int) -> Prompt:
    """A line is a request body, or an object with `body` beside `url` and a name (the form of OpenAI's batches)."""
    if not isinstance(line, dict):
        raise ValueError(f"expected an object, got {type(line).__name__}")
    wrapped = isinstance(line.get("body"), dict)
    body: dict[str, Any] = dict(line["body"] if wrapped else line)
    path = str(line.get("url") or line.get("path") or "") if wrapped else ""
    name = str(line.get("custom_id") or line.get("name") or "") if wrapped else str(body.pop("name", ""))
    if "messages" not in body and "prompt" not in body:
        raise ValueError("neither messages (chat) nor prompt (completions) is there")
    path = path or (CHAT if "messages" in body else COMPLETIONS)
    if path not in (CHAT, COMPLETIONS):
        raise ValueError(f"url {path!r:.60} cannot be verified; known are {CHAT} and {COMPLETIONS}")
    for field in ("n", "best_of"):
        if body.get(field) not in (None, 1):
            raise ValueError(f"{field} {body[field]!r:.20}: one answer a request can be verified; leave it out")
    if not {"max_tokens", "max_completion_tokens"} & body.keys():
        body["max_tokens"] = max_tokens
    kept = {k: v for k, v in body.items() if k not in _OURS}
    return Prompt(re.sub(r"\s+", " ", name)[:NAME_MAX] or f"line-{number}", path, kept)


def _with_names_of_their_own(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    seen: dict[str, int] = {}
    named = []
    for prompt in prompts:
        count = seen[prompt.name] = seen.get(prompt.name, 0) + 1
        name = prompt.name if count == 1 else f"{prompt.name} ({count})"
        named.append(Prompt(name, prompt.path, prompt.body, prompt.optional))
    return tuple(named)
