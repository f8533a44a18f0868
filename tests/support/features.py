"""Everything that a request to the embedded engine may ask for: the rows of docs/exactness.md, and the requests.

Owns the list. Each feature is a request that would come out differently if what it asks for were forgotten at the cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.moving import seam
from support.told import Told

CUT = 20
TOKENS = 48
# Where workers go on while their sessions are moved: long enough that these are not over first on a busy machine.
LONG = 250
# The tiny model's ids: of its end of text, and of letters (special tokens come first).
END = 2
LETTER_A, LETTER_B = 67, 68
GREEDY: dict[str, Any] = {"prompt": "Hello there", "temperature": 0, "max_tokens": TOKENS}
SAMPLED: dict[str, Any] = {"prompt": "A list of numbers: 1, 2", "temperature": 1.0, "seed": 7, "max_tokens": TOKENS}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say something 🎉"}],
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": TOKENS,
}


@dataclass(frozen=True, slots=True)
class Feature:
    """One row: what is asked for, in words and as a request, and what an interrupted answer is.

    `unstreamed` is the same for an answer in one piece ("" where there is none to be had). `given` makes fields of the
    plain answer, and a cut. `sessions` is how many choices there are, `finish` how each
    of them ends.
    """

    name: str
    request: str
    body: dict[str, Any]
    streamed: str = "exact"
    unstreamed: str = "exact"
    finish: str = "length"
    cuts: tuple[int, ...] = (CUT,)
    tier: str = "held"
    sessions: int = 1
    given: Callable[[Told], tuple[int, dict[str, Any]]] | None = None

    @property
    def by_itself(self) -> bool:
        """Whether one worker has all of it until it is moved, once: then that one can be stopped at the very token."""
        return self.sessions == 1 and self.tier == "held" and len(self.cuts) == 1


def _stopping(**more: Any) -> Callable[[Told], tuple[int, dict[str, Any]]]:
    """Stop at text that lies on both sides of the cut."""

    def given(plain: Told) -> tuple[int, dict[str, Any]]:
        cut, text = seam(plain, after=CUT)
        return cut, {"stop": [text, "never said"], **more}

    return given


def _stopping_at_id(plain: Told) -> tuple[int, dict[str, Any]]:
    """Stop at a token that is said for the first time behind the cut."""
    index = next(i for i in range(CUT + 8, TOKENS) if plain.ids.index(plain.ids[i]) == i)
    return CUT, {"stop_token_ids": [plain.ids[index]]}


FEATURES: tuple[Feature, ...] = (
    Feature("greedy", "`temperature: 0`", GREEDY),
    Feature("greedy, first token", "`temperature: 0`, cut at the first token", GREEDY, cuts=(1,)),
    Feature("two moves", "moved after 8 and 60 tokens", {**GREEDY, "max_tokens": LONG}, cuts=(8, 60), unstreamed=""),
    Feature("greedy, chat", "`/v1/chat/completions`", {**CHAT, "temperature": 0}),
    Feature("chat", "sampled", CHAT),
    Feature("temperature", "`temperature: 1.3`", {**SAMPLED, "temperature": 1.3}),
    Feature("top_p", "`top_p: 0.8`", {**SAMPLED, "top_p": 0.8}),
    Feature("top_k", "`top_k: 5`", {**SAMPLED, "top_k": 5}),
    Feature("min_p", "`min_p: 0.1`", {**SAMPLED, "min_p": 0.1}),
    Feature("seed", "`seed: 7`", SAMPLED),
    Feature("presence_penalty", "`presence_penalty: 2`", {**SAMPLED, "presence_penalty": 2.0}),
    Feature("frequency_penalty", "`frequency_penalty: 1.5`", {**SAMPLED, "frequency_penalty": 1.5}),
    Feature("repetition_penalty", "`repetition_penalty: 1.5`", {**SAMPLED, "repetition_penalty": 1.5}),
    Feature(
        "penalties, greedy",
        "`frequency_penalty: 2` between two letters",
        # Which of the two comes next follows from how often each was said.
        {**GREEDY, "frequency_penalty": 2.0, "logit_bias": {str(LETTER_A): 60, str(LETTER_B): 60}},
    ),
    Feature("logit_bias", "`logit_bias`", {**SAMPLED, "logit_bias": {str(LETTER_A): 6.5, "75": -100}}),
    Feature("max_tokens", "`max_tokens: 23`", {**SAMPLED, "max_tokens": CUT + 3}),
    Feature(
        "min_tokens",
        "`min_tokens: 36`, with an end that is likely from the beginning",
        {**SAMPLED, "min_tokens": 36, "logit_bias": {str(END): 100}},
        finish="stop",
    ),
    Feature(
        "ignore_eos",
        "`ignore_eos`, with an end of text among the tokens",
        {**GREEDY, "ignore_eos": True, "frequency_penalty": 2.0, "logit_bias": {str(END): 60, str(LETTER_A): 60}},
    ),
    Feature("stop", "a stop string on both sides of the cut", GREEDY, finish="stop", given=_stopping()),
    Feature("stop, chat", "the same in a chat", {**CHAT}, finish="stop", given=_stopping()),
    Feature(
        "include_stop_str_in_output",
        "the same, left in the answer",
        GREEDY,
        finish="stop",
        given=_stopping(include_stop_str_in_output=True),
    ),
    Feature("stop_token_ids", "a token to stop at behind the cut", GREEDY, finish="stop", given=_stopping_at_id),
    Feature("logprobs", "`logprobs: 3`", {**SAMPLED, "logprobs": 3}, unstreamed="restarted"),
    Feature("logprobs: 0", "`logprobs: 0`", {**GREEDY, "logprobs": 0}, unstreamed="restarted"),
    Feature(
        "top_logprobs",
        "`logprobs`, `top_logprobs: 4`",
        {**CHAT, "logprobs": True, "top_logprobs": 4},
        unstreamed="restarted",
    ),
    Feature(
        "return_tokens_as_token_ids",
        "`logprobs: 1`, tokens named by id",
        {**GREEDY, "logprobs": 1, "return_tokens_as_token_ids": True},
        unstreamed="restarted",
    ),
    Feature("token ids hidden", "`return_token_ids: false`", {**SAMPLED, "return_token_ids": False}),
    Feature(
        "skip_special_tokens",
        "`skip_special_tokens: false`",
        {
            **GREEDY,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "frequency_penalty": 2.0,
            "logit_bias": {str(END): 60, str(LETTER_A): 60},
        },
    ),
    Feature("prompt of token ids", "`prompt: [ids]`", {**SAMPLED, "prompt": [70, 71, 72, 73]}),
    Feature("add_special_tokens", "`add_special_tokens: false`", {**SAMPLED, "add_special_tokens": False}),
    Feature(
        "continue_final_message",
        "`continue_final_message`, an answer of the assistant's that goes on",
        {
            **CHAT,
            "messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two"}],
            "continue_final_message": True,
        },
    ),
    Feature("long prompt", "2,000 characters, computed in chunks", {**GREEDY, "prompt": "a long story " * 150}),
    Feature(
        "usage in every chunk",
        "`continuous_usage_stats`",
        {
            **GREEDY,
            "stream_options": {"continuous_usage_stats": True},
        },
        unstreamed="",
    ),
    Feature(
        "no usage", "`include_usage: false`", {**GREEDY, "stream_options": {"include_usage": False}}, unstreamed=""
    ),
    Feature("cache_salt", "`cache_salt` (there is no prefix cache)", {**SAMPLED, "cache_salt": "pepper"}),
    Feature("n", "`n: 2`, each choice a session", {**SAMPLED, "n": 2, "max_tokens": LONG}, sessions=2),
    Feature("n, chat", "`n: 2` in a chat", {**CHAT, "n": 2, "max_tokens": LONG}, sessions=2),
    Feature(
        "several prompts",
        "`prompt: [text, text]`",
        {**SAMPLED, "prompt": ["One", "Two"], "max_tokens": LONG},
        sessions=2,
    ),
    Feature("from disk", "KV from a stored snapshot", GREEDY, tier="disk"),
)


@dataclass(frozen=True, slots=True)
class Refused:
    """One row of what the engine does not offer: the fields that ask for it, and which of them its error names."""

    name: str
    fields: dict[str, Any]
    param: str
    chat: bool = False


_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
_PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]

NOT_OFFERED: tuple[Refused, ...] = (
    Refused("best_of", {"best_of": 2}, "best_of"),
    Refused("beam search", {"use_beam_search": True}, "use_beam_search"),
    Refused("echo", {"echo": True}, "echo"),
    Refused("prompt_logprobs", {"prompt_logprobs": 1}, "prompt_logprobs"),
    Refused("suffix", {"suffix": "the end"}, "suffix"),
    Refused("bad_words", {"bad_words": ["no"]}, "bad_words"),
    Refused("allowed_token_ids", {"allowed_token_ids": [70]}, "allowed_token_ids"),
    Refused("repetition_detection", {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
    Refused("logprobs of chosen ids", {"logprobs": 1, "logprob_token_ids": [70]}, "logprob_token_ids"),
    Refused("JSON schema", {"response_format": _SCHEMA}, "response_format", chat=True),
    Refused("JSON object", {"response_format": {"type": "json_object"}}, "response_format", chat=True),
    Refused("regex", {"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    Refused("grammar", {"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
    Refused("choice", {"guided_choice": ["a", "b"]}, "guided_choice"),
    Refused("tool calls", {"tools": [_TOOL]}, "tools", chat=True),
    Refused("tool_choice", {"tool_choice": "required"}, "tool_choice", chat=True),
    Refused("reasoning_effort", {"reasoning_effort": "high"}, "reasoning_effort", chat=True),
    Refused("include_reasoning", {"include_reasoning": False}, "include_reasoning", chat=True),
    Refused("thinking_token_budget", {"thinking_token_budget": 5}, "thinking_token_budget", chat=True),
    Refused("priority", {"priority": 1}, "priority"),
    Refused("stream_interval", {"stream_interval": 5}, "stream_interval"),
    Refused("token offsets and prompt text", {"return_prompt_text": True}, "return_prompt_text"),
    Refused("prompt embeddings", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    Refused("images", {"messages": _PICTURE}, "messages", chat=True),
    Refused("chat template of the client's own", {"chat_template": "{{ x }}"}, "chat_template", chat=True),
    Refused("logits processors", {"logits_processors": ["some.where"]}, "logits_processors"),
    Refused("truncate_prompt_tokens", {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    Refused("LoRA adapter", {"model": "another"}, "model"),
    Refused("a field that nobody knows", {"some_future_field": 0}, "some_future_field"),
)
