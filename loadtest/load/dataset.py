"""Prompts from a file: JSONL with a prompt or messages a line, or ShareGPT's conversations in one JSON array.

Owns the reading. It draws nothing, and sends nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.errors import ConfigError

FILE_BYTES_MAX = 1 << 30
_WORDS = (
    'expected JSON lines with "prompt" or "messages" (and "output_tokens" or "max_tokens", if wanted), '
    'or ShareGPT: a JSON array of {"conversations": [{"from": "human", "value": ...}, ...]}'
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt of a data set: text, or the messages of a chat."""

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    output_tokens: int | None = None


def read_dataset(path: Path) -> list[Entry]:
    """All prompts of a file; ConfigError names what cannot be taken for one."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX >> 20} MiB; cut a sample out of it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a data set") from error
    entries = _sharegpt(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    if not entries:
        raise ConfigError(f"{path}: no prompts in it; {_WORDS}")
    return entries


def _lines(text: str, path: Path) -> list[Entry]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            entry = _conversation(told) if "conversations" in told else _entry(told)
            if entry is None:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: {line[:80]!r} holds no prompt; {_WORDS}") from error
        found.append(entry)
    return found


def _sharegpt(text: str, path: Path) -> list[Entry]:
    try:
        entries = [_conversation(told) for told in json.loads(text)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be taken for a data set ({error!r}); {_WORDS}") from error
    # Some conversations of the well-known file begin with an answer.
    return [entry for entry in entries if entry is not None]


def _conversation(told: dict[str, Any]) -> Entry | None:
    said = told["conversations"]
    if not said or said[0]["from"] not in ("human", "user") or not said[0]["value"]:
        return None
    return Entry(prompt=str(said[0]["value"]))


def _entry(told: dict[str, Any]) -> Entry:
    tokens = told.get("output_tokens", told.get("max_tokens"))
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError("output_tokens")
    if isinstance(told.get("messages"), list) and told["messages"]:
        return Entry(messages=tuple(dict(message) for message in told["messages"]), output_tokens=tokens)
    if not isinstance(told["prompt"], str) or not told["prompt"]:
        raise ValueError("prompt")
    return Entry(prompt=told["prompt"], output_tokens=tokens)
