"""Which requests can go on exactly where they were cut, and what stands in the way of the others. Pure.

A session is resumable when it has one output that its token ids decide: the engine journals them, and what the client
has can be told from them, or, where the proxy sees none, from text and events alone. Each rule of the table has a word
for the obstacle; a request that meets one gets no marker (docs/exactness.md).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from .dialects import by_path
from .eligible_events import NO_SESSION as NO_EVENT_SESSION
from .eligible_events import EventObstacle, why_no_message, why_no_response
from .eligible_generate import NO_SESSION as NO_GENERATE_SESSION
from .eligible_generate import GenerateObstacle, why_no_generate

Body = Mapping[str, Any]

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_result", "tool_use"})


class NotResumable(StrEnum):
    """Why a request cannot go on exactly."""

    SEVERAL_CHOICES = "n"
    BEST_OF = "best_of"
    BEAM_SEARCH = "beam_search"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_EMBEDS = "prompt_embeds"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    NO_OUTPUT = "no_output"
    MULTIMODAL = "multimodal"
    HIDDEN_IDS = "hidden_ids"
    ENCODER_TRANSFER = "ec_transfer_params"
    UNCLEAR_STREAM = "stream"


def _more_than_one(name: str) -> Callable[[Body], bool]:
    return lambda body: body.get(name) not in (None, 1)


def _unclear_stream(body: Body) -> bool:
    """Anything but true, false or nothing is for the engine to judge; 1 too, although 1 == True here."""
    stream = body.get("stream")
    return stream is not None and not isinstance(stream, bool)


def _several_prompts(body: Body) -> bool:
    """`prompt` is one text, one list of ids, or a list with one of these."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) != 1 and not all(type(item) is int for item in prompt)


def _multimodal(body: Body) -> bool:
    """Whether a chat holds parts that are no text: what they become in the prompt is not in its token ids."""
    for message in _list(body.get("messages")):
        parts = message.get("content") if isinstance(message, dict) else None
        for part in _list(parts):
            if isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS:
                return True
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _no_output(body: Body) -> bool:
    return 0 in (body.get("max_tokens"), body.get("max_completion_tokens"))


def _hides_ids_of_logprobs(body: Body) -> bool:
    """0 asks for logprobs, too, although 0 == False here: for those of the tokens that were drawn."""
    logprobs = body.get("logprobs")
    return body.get("include_reasoning") is False and logprobs is not None and logprobs is not False


_RULES: tuple[tuple[Callable[[Body], bool], NotResumable], ...] = (
    (_unclear_stream, NotResumable.UNCLEAR_STREAM),
    (_more_than_one("n"), NotResumable.SEVERAL_CHOICES),
    (_more_than_one("best_of"), NotResumable.BEST_OF),
    (lambda body: bool(body.get("use_beam_search")), NotResumable.BEAM_SEARCH),
    (_several_prompts, NotResumable.SEVERAL_PROMPTS),
    (lambda body: body.get("prompt_embeds") is not None, NotResumable.PROMPT_EMBEDS),
    # vLLM leaves the echoed text out when token ids are asked for.
    (lambda body: bool(body.get("echo")), NotResumable.ECHO),
    # They come from the prefill, which a resumed request does not repeat.
    (lambda body: body.get("prompt_logprobs") is not None, NotResumable.PROMPT_LOGPROBS),
    (_no_output, NotResumable.NO_OUTPUT),
    (_multimodal, NotResumable.MULTIMODAL),
    # With hidden reasoning vLLM withholds the ids of all chunks: text decides then, and logprobs are of no text.
    (_hides_ids_of_logprobs, NotResumable.HIDDEN_IDS),
    (lambda body: body.get("ec_transfer_params") is not None, NotResumable.ENCODER_TRANSFER),
)


Obstacle = NotResumable | EventObstacle | GenerateObstacle

# Nothing is generated, or it is the engine's to say what was meant: there is no session in these.
NO_SESSION: frozenset[Obstacle] = (
    frozenset({NotResumable.UNCLEAR_STREAM, NotResumable.NO_OUTPUT}) | NO_EVENT_SESSION | NO_GENERATE_SESSION
)


def why_not_resumable(body: Body, path: str = "") -> Obstacle | None:
    """The first rule of the API at `path` that a request meets, or None: then it can go on exactly."""
    match path:
        case by_path.RESPONSES_PATH:
            return why_no_response(body)
        case by_path.MESSAGES_PATH:
            return why_no_message(body)
        case by_path.GENERATE_PATH:
            return why_no_generate(body)
    return next((reason for rule, reason in _RULES if rule(body)), None)
