"""What a client may ask for: request bodies, checked and frozen. Pure.

Owns validation of OpenAI completions and chat requests. Invariant: a field that this server cannot honour is refused by
name, never ignored, and so is one that it does not know: who can tell what it would have changed? It does not tokenize.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...session.marker import FIELD, NAME, Marker
from .fields import Fields, RequestError

STOPS_MAX = 16
STOP_CHARS_MAX = 1024
TOP_LOGPROBS_MAX = 20
REQUEST_ID_CHARS_MAX = 256

# Known fields that change what is generated and that this engine does not do.
_UNSUPPORTED = (
    "tools",
    "functions",
    "function_call",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "use_beam_search",
    "suffix",
    "echo",
    "audio",
    "chat_template",
    "documents",
    "prediction",
)
# What a field says that asks for nothing. A zero is not among them: there are fields where it asks for something.
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
# Known fields that change nothing of an answer here: names and labels, and what concerns caches, tools and queues, of
# which there are none.
_INDIFFERENT = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "store",
        "service_tier",
        "cache_salt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)


# Arguments of apply_chat_template itself: a template of a client's own is a program to run here.
_TEMPLATE_ARGUMENTS = frozenset(
    {"chat_template", "tools", "documents", "tokenize", "tokenizer_kwargs", "return_tensors", "return_dict"}
)


class Kind(StrEnum):
    """Which of the two APIs a request came by."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and where they end. `max_tokens` None: as many as there is room for."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenized already."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """A chat; the content of every message is text."""

    items: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked."""

    kind: Kind
    model: str | None
    prompt: str | TokenIds | Messages
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    add_special_tokens: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    request_id: str | None = None
    marker: Marker | None = None


def parse(kind: Kind, body: object) -> Request:
    """Check a decoded JSON body; RequestError names the field and what is right there."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    fields = Fields(body)
    _refuse_unsupported(fields)
    options = fields.mapping("stream_options")
    stream = fields.flag("stream", False)
    if options and not stream:
        raise RequestError("stream_options only goes with stream: true", param="stream_options")
    chat = kind is Kind.CHAT
    request = Request(
        kind=kind,
        model=fields.text("model"),
        prompt=_messages(fields.get("messages")) if chat else _prompt(fields.get("prompt")),
        params=_sampling(kind, fields),
        stream=stream,
        include_usage=Fields(options).flag("include_usage", False),
        continuous_usage=Fields(options).flag("continuous_usage_stats", False),
        return_token_ids=fields.flag("return_token_ids", False),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids", False),
        add_special_tokens=fields.flag("add_special_tokens", not chat),
        template=_template(fields) if chat else {},
        request_id=fields.text("request_id"),
        marker=_marker(fields),
    )
    for name in fields.unread:
        if name not in _INDIFFERENT:
            raise RequestError(f"{name!r:.80} is not known to this engine; leave it out", param=name)
    return request


def _sampling(kind: Kind, fields: "Fields") -> SamplingParams:
    if kind is Kind.CHAT:
        wanted = fields.flag("logprobs", False)
        top = fields.whole("top_logprobs", 0, 0, TOP_LOGPROBS_MAX)
        if top and not wanted:
            raise RequestError("top_logprobs only goes with logprobs: true", param="top_logprobs")
        logprobs = top if wanted else None
        newer, older = (fields.optional_whole(name, 1) for name in ("max_completion_tokens", "max_tokens"))
        max_tokens = older if newer is None else newer
    else:
        logprobs = fields.optional_whole("logprobs", 0, TOP_LOGPROBS_MAX)
        max_tokens = fields.whole("max_tokens", 16, 1, 1 << 31)
    min_tokens = fields.whole("min_tokens", 0, 0, 1 << 31)
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens")
    top_k = fields.whole("top_k", 0, -1, 1 << 31)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_least=True),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=fields.optional_whole("seed", -(1 << 63), (1 << 64) - 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 100.0, above_least=True),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=fields.flag("ignore_eos", False),
        stop=_stops(fields.get("stop")),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output", False),
        stop_token_ids=_token_ids(fields.get("stop_token_ids") or [], "stop_token_ids"),
        logprobs=logprobs,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
    )


def _refuse_unsupported(fields: "Fields") -> None:
    for name in ("n", "best_of"):
        if fields.whole(name, 1, 1, 1 << 31) != 1:
            raise RequestError(f"{name} must be 1: this engine writes one answer a request", param=name)
    for name in _UNSUPPORTED:
        if not _is_nothing(fields.get(name)):
            raise RequestError(f"{name} is not supported by this engine; leave it out", param=name)
    if fields.get("priority") not in (None, 0):
        raise RequestError(
            "priority is not supported by this engine, which serves in turn; leave it out", param="priority"
        )
    kind = fields.mapping("response_format").get("type", "text")
    if kind != "text":
        raise RequestError(
            f"response_format {kind!r:.80} is not supported by this engine; leave it out", param="response_format"
        )
    if fields.get("tool_choice") not in (None, "none", "auto"):
        raise RequestError("tool_choice is not supported by this engine; leave it out", param="tool_choice")
    if fields.get("modalities") not in (None, ["text"]):
        raise RequestError('modalities must be ["text"]', param="modalities")


def _is_nothing(value: object) -> bool:
    return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


def _prompt(prompt: object) -> str | TokenIds:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        raise RequestError(f"prompt holds {len(prompt)} prompts; send one a request", param="prompt")
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text or a list of token ids that is not empty", param="prompt")
    return TokenIds(_token_ids(prompt, "prompt"))


def _messages(messages: object) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list that is not empty", param="messages")
    return Messages(tuple(_message(index, message) for index, message in enumerate(messages)))


def _message(index: int, message: object) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(f"{where}: only parts of type text are supported", param="messages")
            texts.append(part["text"])
        content = "".join(texts)
    if message.get("tool_calls"):
        raise RequestError(f"{where}: tool_calls are not supported by this engine", param="messages")
    if content is not None and not isinstance(content, str):
        raise RequestError(f"{where}.content must be a text or a list of parts", param="messages")
    return {**message, "content": content or ""}


def _template(fields: "Fields") -> Mapping[str, Any]:
    going_on = fields.flag("continue_final_message", False)
    generation = fields.flag("add_generation_prompt", not going_on)
    if going_on and generation:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    extra = fields.mapping("chat_template_kwargs")
    if taken := sorted(_TEMPLATE_ARGUMENTS & extra.keys()):
        raise RequestError(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
    return {
        **extra,
        "add_generation_prompt": generation,
        "continue_final_message": going_on,
    }


def _marker(fields: "Fields") -> Marker | None:
    ours = fields.mapping(FIELD).get(NAME)
    if ours is None:
        return None
    try:
        return Marker.from_json(ours)
    except ValueError as error:
        raise RequestError(str(error), param=FIELD) from error


def _logit_bias(mapping: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in mapping.items():
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not (key.isdecimal() and known and -100 <= value <= 100):
            raise RequestError(
                f"logit_bias {key!r:.40}: {value!r:.40}; expected a token id and a bias from -100 to 100",
                param="logit_bias",
            )
        pairs.append((int(key), float(value)))
    return tuple(sorted(pairs))


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= STOP_CHARS_MAX for s in stops):
        raise RequestError(f"stop must be a text or a list of texts of 1 to {STOP_CHARS_MAX} characters", param="stop")
    if len(stops) > STOPS_MAX:
        raise RequestError(f"stop holds {len(stops)} texts; at most {STOPS_MAX} are allowed", param="stop")
    return tuple(stops)


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in value
    ):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    return tuple(value)
