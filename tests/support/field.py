"""What the cases from the field need to know of an engine, to be the same cases on each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Manner:
    """An engine and its model, for requests that make it say what a case is about.

    `emoji` makes it say characters of several tokens; `wordy` is a prompt that it answers with words; `ending` makes an
    end of text likely from the first token on, `pair` are two letters that are one token when they stand together.
    `stopped_by` is the field that tells which stop string ended a choice; `core` is part of the name of the process
    that computes, "" for a worker that is one process. `has_one_time`: all chunks of a chat have the same time.
    """

    name: str
    block_tokens: int
    wordy: str
    emoji: Mapping[str, Any]
    ending: Mapping[str, Any]
    pair: tuple[int, int]
    merged: int
    filler_id: int
    tokens: int
    stopped_by: str = "stop_reason"
    core: str = ""
    has_one_time: bool = True


EMBEDDED = Manner(
    name="embedded",
    block_tokens=16,
    wordy="Hello there",
    emoji={"prompt": "Hello there"},
    # The tiny model's end of text.
    ending={"prompt": "Hello there", "logit_bias": {"2": 100}},
    pair=(119, 107),
    merged=259,
    filler_id=123,
    tokens=48,
)
VLLM = Manner(
    name="vllm",
    block_tokens=128,
    wordy="Write a long story about a dog named Max.",
    emoji={"prompt": "Draw rockets.", "structured_outputs": {"regex": "(😀|🚀|🌍){12}"}},
    ending={"prompt": "The capital of France is", "logit_bias": {"2": 100}},
    pair=(100, 88),
    merged=373,
    filler_id=2767,
    tokens=40,
    core="EngineCore",
)
SGLANG = replace(
    VLLM,
    name="sglang",
    block_tokens=64,
    emoji={"prompt": "Draw rockets.", "regex": "(😀|🚀|🌍){12}"},
    stopped_by="matched_stop",
    # In chats SGLang writes into each chunk when that was made.
    has_one_time=False,
    core="sglang::schedul",
)
