"""Everything that a request can ask of SGLang and that must be as it would have been, wherever the session is moved.

Owns the table of cases, as support/moved_features.py runs them. The names are those of docs/exactness.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from support.moved_features import Feature
from support.vllm_rig import CHAT, COMPLETIONS

STORY = "Write a long story about a dog named Max."
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'root ::= "SELECT " column (", " column){5,12} " FROM t"\ncolumn ::= [a-z]{3,6}'
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
DRAWN = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}


def _chat(
    name: str, prompt: str = STORY, *, cuts: tuple[int, ...] = (14,), alone: bool = False, **more: Any
) -> Feature:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 36,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    return Feature(name, CHAT, {k: v for k, v in body.items() if v is not None}, cuts, alone)


def _text(
    name: str, prompt: str | list[int] = STORY, *, cuts: tuple[int, ...] = (14,), alone: bool = False, **more: Any
) -> Feature:
    told = _chat(name, cuts=cuts, alone=alone, **more).body
    return Feature(
        name, COMPLETIONS, {**{k: v for k, v in told.items() if k != "messages"}, "prompt": prompt}, cuts, alone
    )


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


_WHOLE: Mapping[str, Any] = {"stream": False, "stream_options": None}

FEATURES: tuple[Feature, ...] = (
    _chat("greedy"),
    _text("greedy, completions"),
    _text("prompt of token ids", list(range(1000, 1150))),
    _chat("temperature, top_p, top_k", seed=5, **DRAWN),
    _text("temperature, completions", seed=9, temperature=1),
    _chat("penalties", temperature=0.8, seed=6, **PENALTIES),
    _chat("penalties, greedy", **PENALTIES),
    _chat("logit_bias", logit_bias={"338": -5, "260": 3}),
    _chat("min_tokens", "Say hi.", min_tokens=30),
    _chat("ignore_eos", "Say hi.", ignore_eos=True),
    # The shallow model says to that: isir independent succession occurrence occurrence asû alistic alirir al
    # Superintendentogenousific antific antific ... Nothing keeps it from a stop string before `min_tokens`.
    _chat("stop", stop=["ntificanti"], min_tokens=24),
    _chat("stop, no_stop_trim", stop=["ntificanti"], no_stop_trim=True, min_tokens=24),
    _chat("stop_token_ids", stop_token_ids=[5251, 17950], min_tokens=24),
    _chat("stop_regex", stop_regex="[aeiou]nt[aeiou]fic[aeiou]nt", min_tokens=24),
    _chat("JSON schema", "Describe a person as JSON.", max_tokens=80, response_format=_schema(PERSON)),
    _chat("JSON object", "Describe a person as JSON.", response_format={"type": "json_object"}),
    _chat("regex", "Numbers.", regex="([0-9]{3}-){12}"),
    _chat("grammar", "SQL.", ebnf=LIST),
    _chat("half characters", "Draw rockets.", cuts=(18,), regex="(😀|🚀|🌍){12}"),
    _chat("cache_salt", cache_salt="pepper"),
    _text("chunked prefill", LONG_PROMPT, temperature=1, seed=7),
    _chat("skip_special_tokens", skip_special_tokens=False, ignore_eos=True, logit_bias={"2": 6}),
    _chat("return_token_ids off", return_token_ids=None),
    _chat("usage in every chunk", stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _chat("no usage", stream_options=None),
    _chat(
        "continue_final_message",
        messages=[{"role": "user", "content": STORY}, {"role": "assistant", "content": "Once"}],
        continue_final_message=True,
    ),
    replace(_chat("from disk", temperature=0.9, seed=12, cuts=(25,)), tier="disk"),
    _chat("two moves", temperature=0.9, seed=11, cuts=(9, 22)),
    _chat("unseeded", temperature=0.9, alone=True),
    _chat("logprobs, chat", logprobs=True, top_logprobs=4, alone=True),
    _text("logprobs, completions", logprobs=3, alone=True),
    # What they were of the tokens so far died with the engine, and nobody has them.
    replace(_chat("logprobs, unstreamed", logprobs=True, top_logprobs=2, alone=True, **_WHOLE), outcome="restarted"),
    _chat("unstreamed", alone=True, **_WHOLE),
    _text("unstreamed, completions", alone=True, **_WHOLE),
)
