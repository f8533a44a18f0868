"""What stands in the way of going on exactly in `/generate`. Pure. `eligible` has the other APIs."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

Body = Mapping[str, Any]


class GenerateObstacle(StrEnum):
    """Why such a request cannot go on exactly."""

    UNCLEAR_STREAM = "stream"
    SEVERAL_CHOICES = "n"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_EMBEDS = "prompt_embeds"
    MULTIMODAL = "multimodal"
    LOGPROBS = "logprobs"
    HIDDEN_STATES = "hidden_states"
    ENGINE_SESSION = "engine_session"
    NO_OUTPUT = "no_output"


# Nothing is generated, or it is the engine's to say what was meant.
NO_SESSION = frozenset({GenerateObstacle.UNCLEAR_STREAM, GenerateObstacle.NO_OUTPUT})


def params_of(body: Body) -> Body:
    """The object with a request's sampling parameters."""
    params = body.get("sampling_params")
    return params if isinstance(params, dict) else {}


def _unclear_stream(body: Body) -> bool:
    stream = body.get("stream")
    return stream is not None and not isinstance(stream, bool)


def _several_prompts(body: Body) -> bool:
    ids = body.get("input_ids")
    nested = isinstance(ids, list) and any(not isinstance(item, int) for item in ids)
    return isinstance(body.get("text"), list) or nested or isinstance(body.get("sampling_params"), list)


def _has(*names: str) -> Callable[[Body], bool]:
    return lambda body: any(body.get(name) not in (None, False) for name in names)


_RULES: tuple[tuple[Callable[[Body], bool], GenerateObstacle], ...] = (
    (_unclear_stream, GenerateObstacle.UNCLEAR_STREAM),
    (lambda body: params_of(body).get("max_new_tokens") == 0, GenerateObstacle.NO_OUTPUT),
    (_several_prompts, GenerateObstacle.SEVERAL_PROMPTS),
    (lambda body: params_of(body).get("n") not in (None, 1), GenerateObstacle.SEVERAL_CHOICES),
    (_has("input_embeds"), GenerateObstacle.PROMPT_EMBEDS),
    (_has("image_data", "video_data", "audio_data"), GenerateObstacle.MULTIMODAL),
    # Each event tells those of all tokens again, and those of an engine that died are nowhere.
    (_has("return_logprob"), GenerateObstacle.LOGPROBS),
    (_has("return_hidden_states", "return_routed_experts", "return_indexer_topk"), GenerateObstacle.HIDDEN_STATES),
    (_has("session_params", "session_id"), GenerateObstacle.ENGINE_SESSION),
)


def why_no_generate(body: Body) -> GenerateObstacle | None:
    """The first obstacle in a request to `/generate`, or None."""
    return next((reason for rule, reason in _RULES if rule(body)), None)
