"""The demo's model as one that thinks first: a word that it says early ends its thoughts, instead of being said.

Owns the folder that it writes; weights are linked, never copied.
"""

import json
from pathlib import Path
from typing import Any


def thinking_until(word: str, model: Path, folder: Path) -> Path:
    """A copy of a model whose token for `word` (as the tokenizer writes it) is `</think>`; an idle one is `<think>`.

    The word itself is made of smaller pieces from then on, where it stands in a prompt.
    """
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "tokenizer.json":
            (folder / path.name).symlink_to(path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<jupyter_start>":
            token["content"] = "<think>"
    learned: dict[str, Any] = tokenizer["model"]
    renamed = {word: "</think>", "<jupyter_start>": "<think>"}
    learned["vocab"] = {renamed.get(token, token): number for token, number in learned["vocab"].items()}
    learned["merges"] = [merge for merge in learned["merges"] if word not in _pieces(merge)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder


def _pieces(merge: "str | list[str]") -> tuple[str, ...]:
    """What a merge takes and what it makes."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
