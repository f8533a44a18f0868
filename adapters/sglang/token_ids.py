"""Token ids in the chunks of a stream that SGLang writes without them.

Owns the account of one stream: which ids came with which piece of output, and which of them are still to be written.
Invariant: an id is written once, in order, and never before the text that came with it. Works on chunks as text:
SGLang's own bytes stay as they are but for the members that are added. Pure.
"""

from collections.abc import Mapping
from typing import Any

_CHOICE = '"choices":[{'
_FINISHES = '"finish_reason":"'
_IDS = '"token_ids":['


class Tap:
    """The ids of one stream with one choice."""

    def __init__(self, *, incremental: bool) -> None:
        """`incremental`: each piece of output tells its own ids, and not all of them so far."""
        self._incremental = incremental
        self._seen = 0
        self._due: list[int] = []
        self._prompt: list[int] | None = None

    def take(self, output: Mapping[str, Any]) -> None:
        """A piece of output is about to become chunks."""
        ids = output["output_ids"]
        # The list grows while the stream waits: what is in it now came with this piece's text.
        new = list(ids if self._incremental else ids[self._seen :])
        if not self._seen and self._prompt is None and output.get("prompt_token_ids") is not None:
            self._prompt = list(output["prompt_token_ids"])
        self._seen += len(new)
        self._due += new

    def written(self, event: str) -> str:
        """A chunk with the ids that are due; as it is if it has no choice."""
        at = event.find(_CHOICE)
        if at < 0:
            return event
        due, self._due = self._due, []
        members = f"{_IDS}{','.join(map(str, due))}],"
        if self._prompt:
            members += f'"prompt_token_ids":[{",".join(map(str, self._prompt))}],'
            self._prompt = []
        at += len(_CHOICE)
        return event[:at] + members + event[at:]


def has_ids(event: str) -> bool:
    """Whether a chunk has ids; within a text the name's quotes would be escaped."""
    return _IDS in event


def finishes(event: str) -> bool:
    """Whether a chunk ends its choice."""
    return _FINISHES in event
