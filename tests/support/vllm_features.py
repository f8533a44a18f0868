"""Everything that a request can ask of vLLM and that must be as it would have been, wherever the session is moved.

Owns the table of cases: a name, a request and the outputs after which the session is moved to another worker (more than
one number: it is moved again). The names are those of docs/exactness.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from support.moved_features import Feature
from support.vllm_models import THINK_END_ID
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
DAYS = {"type": "array", "items": {"enum": ["monday", "tuesday", "wednesday"]}, "minItems": 3, "maxItems": 3}
LIST = 'root ::= "SELECT " column (", " column){5,12} " FROM t"\ncolumn ::= [a-z]{3,6}'
CHOICES = [
    "the quick brown fox jumps over the lazy dog and runs away",
    "the slow red fox jumps over the lazy dog and falls asleep",
]
_WEATHER_CALL = (
    r"<tool_call>\{\"name\": \"get_weather\", \"arguments\": \{\"city\": \"[A-Z][a-z]{14,19}\"\}\}</tool_call>"
)
_TIME_CALL = r"<tool_call>\{\"name\": \"get_time\", \"arguments\": \{\"zone\": \"[A-Z][a-z]{14,19}\"\}\}</tool_call>"
# What a model that calls two tools after each other says, in the words that the parser knows.
TWO_CALLS = rf"Sure, wait\. {_WEATHER_CALL}\n{_TIME_CALL}"


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
        # The parser takes everything for thoughts unless it is told that there are none.
        "chat_template_kwargs": {"enable_thinking": False},
        **more,
    }
    return Feature(name, CHAT, {k: v for k, v in body.items() if v is not None}, cuts, alone)


def _text(
    name: str, prompt: str = STORY, *, cuts: tuple[int, ...] = (14,), alone: bool = False, **more: Any
) -> Feature:
    told = _chat(name, cuts=cuts, alone=alone, **more).body
    body = {k: v for k, v in told.items() if k not in ("messages", "chat_template_kwargs")}
    return Feature(name, COMPLETIONS, {**body, "prompt": prompt}, cuts, alone)


def _tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


WEATHER = _tool("get_weather", {"city": {"type": "string", "maxLength": 20}, "days": DAYS})
TIME = _tool("get_time", {"zone": {"type": "string", "maxLength": 20}})
THINKING = {"enable_thinking": True}


def _thinks_first(prompt: str) -> dict[str, Any]:
    """An answer that begins in its thoughts, with a budget for them: counted from the word in the prompt.

    For those who are alone: when it has ended, this vLLM may end the thoughts of whoever gets its row of the batch.
    """
    return {
        "messages": [{"role": "user", "content": f"{prompt} <think>"}],
        "chat_template_kwargs": THINKING,
        "thinking_token_budget": 25,
    }


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}

FEATURES: tuple[Feature, ...] = (
    _chat("greedy"),
    _text("greedy, completions"),
    _chat("temperature, top_p, top_k, min_p", temperature=0.9, seed=5, top_p=0.9, top_k=40, min_p=0.02),
    _chat("penalties", temperature=0.8, seed=6, **PENALTIES),
    _chat("logit_bias", logit_bias={"338": -5, "260": 3}),
    _chat("bad_words", bad_words=[" dog", " Max", "the"]),
    _text("allowed_token_ids", allowed_token_ids=list(range(200, 3000))),
    _chat("min_tokens", "Say hi.", min_tokens=30),
    _chat("ignore_eos", "Say hi.", ignore_eos=True),
    _chat("stop, include_stop_str_in_output", stop=[" was"], include_stop_str_in_output=True, min_tokens=24),
    _chat("stop_token_ids", stop_token_ids=[253, 260, 284, 288], min_tokens=24),
    _chat(
        "repetition_detection", ignore_eos=True, max_tokens=60,
        repetition_detection={"max_pattern_size": 30, "min_count": 8},
    ),
    _chat("JSON schema", "Describe a person as JSON.", max_tokens=80, response_format=_schema(PERSON)),
    _chat("JSON object", "Describe a person as JSON.", response_format={"type": "json_object"}),
    _chat("regex", "Numbers.", structured_outputs={"regex": "([0-9]{3}-){12}"}),
    _chat("grammar", "SQL.", structured_outputs={"grammar": LIST}),
    _chat("choice", "Pick.", cuts=(9,), structured_outputs={"choice": CHOICES}),
    _chat("half characters", "Draw rockets.", cuts=(18,), structured_outputs={"regex": "(😀|🚀|🌍){12}"}),
    _chat(
        "tool call, named", "Weather in Paris?", tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ),
    _chat("tool call, required", "Weather?", tools=[WEATHER, TIME], tool_choice="required", max_tokens=90),
    _chat(
        "tool calls, two", "Weather?", cuts=(28, 52), tools=[WEATHER, TIME], tool_choice="auto", max_tokens=130,
        structured_outputs={"regex": TWO_CALLS},
    ),
    _chat(
        "reasoning", cuts=(8, 24), chat_template_kwargs=THINKING, ignore_eos=True,
        logit_bias={str(THINK_END_ID): 9.5},
    ),
    _chat(
        "JSON schema after reasoning, cut in the thoughts", cuts=(10,), alone=True, max_tokens=90,
        response_format=_schema(PERSON),
        **_thinks_first("Describe a person as JSON."),
    ),
    _chat(
        "JSON schema after reasoning, cut in the object", cuts=(45,), alone=True, max_tokens=90,
        response_format=_schema(PERSON),
        **_thinks_first("Describe a person as JSON."),
    ),
    _chat("thinking_token_budget", cuts=(10, 28), alone=True, ignore_eos=True, **_thinks_first(STORY)),
    _chat("cache_salt", cache_salt="pepper"),
    _chat("priority", priority=-5),
    _text("chunked prefill", LONG_PROMPT, temperature=1, seed=7),
    _chat("stream_interval", stream_interval=5),
    _chat("skip_special_tokens", skip_special_tokens=False, ignore_eos=True, logit_bias={"2": 6}),
    _chat("return_token_ids off", return_token_ids=None),
    _chat("usage in every chunk", stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _chat("no usage", stream_options=None),
    _chat("token offsets and prompt text", return_token_offsets=True, return_prompt_text=True),
    _chat(
        "continue_final_message",
        messages=[{"role": "user", "content": STORY}, {"role": "assistant", "content": "Once"}],
        continue_final_message=True, add_generation_prompt=False,
    ),
    _chat("names by id", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, alone=True),
    replace(_chat("from disk", temperature=0.9, seed=12, cuts=(25,)), tier="disk"),
    _chat("two moves", temperature=0.9, seed=11, cuts=(9, 22)),
    _chat("unseeded", temperature=0.9, alone=True),
    _chat("logprobs, chat", logprobs=True, top_logprobs=4, alone=True),
    _text("logprobs, completions", logprobs=3, alone=True),
    _chat("logprobs of chosen ids", logprobs=True, logprob_token_ids=[260, 338], alone=True),
    replace(
        _chat("logprobs, unstreamed", stream=False, stream_options=None, logprobs=True, top_logprobs=2, alone=True),
        # What they were of the tokens so far died with the engine, and nobody has them.
        outcome="restarted",
    ),
    _chat("unstreamed", stream=False, stream_options=None, alone=True),
    _chat(
        "unstreamed tool call", "Weather?", stream=False, stream_options=None, alone=True, tools=[WEATHER, TIME],
        tool_choice="required", max_tokens=90,
    ),
)  # fmt: skip
