"""One request for each word that says why a request cannot go on exactly."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.proxy.dialects.by_path import GENERATE_PATH, MESSAGES_PATH, RESPONSES_PATH
from midstream.proxy.eligible import NotResumable, Obstacle
from midstream.proxy.eligible_events import EventObstacle
from midstream.proxy.eligible_generate import GenerateObstacle

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@dataclass(frozen=True, slots=True)
class Obstructed:
    """A request to an API, and the word for what is in its way."""

    path: str
    word: Obstacle
    body: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The API's last name and the word."""
        return f"{self.path.rsplit('/', 1)[-1]}: {self.word.value}"


def _text(word: Obstacle, **fields: Any) -> Obstructed:
    return Obstructed(COMPLETIONS, word, {"prompt": "x", **fields})


def _chat(word: Obstacle, **fields: Any) -> Obstructed:
    return Obstructed(CHAT, word, {"messages": [{"role": "user", "content": "x"}], **fields})


def _response(word: Obstacle, **fields: Any) -> Obstructed:
    return Obstructed(RESPONSES_PATH, word, {"input": "x", **fields})


def _message(word: Obstacle, **fields: Any) -> Obstructed:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **fields}
    return Obstructed(MESSAGES_PATH, word, body)


def _generate(word: Obstacle, **fields: Any) -> Obstructed:
    return Obstructed(GENERATE_PATH, word, {"text": "x", **fields})


OBSTACLES: tuple[Obstructed, ...] = (
    _text(NotResumable.UNCLEAR_STREAM, stream="yes"),
    # As they are: `n` and several prompts that can be told apart become sessions of their own.
    _text(NotResumable.SEVERAL_CHOICES, n="two"),
    _text(NotResumable.SEVERAL_PROMPTS, prompt=["text", [1, 2]]),
    _text(NotResumable.BEST_OF, best_of=3),
    _text(NotResumable.BEAM_SEARCH, use_beam_search=True),
    _text(NotResumable.PROMPT_EMBEDS, prompt_embeds="AAAA"),
    _text(NotResumable.ECHO, echo="yes"),
    _text(NotResumable.PROMPT_LOGPROBS, prompt_logprobs="all"),
    _text(NotResumable.NO_OUTPUT, max_tokens=0),
    _chat(NotResumable.MULTIMODAL, messages=[{"role": "user", "content": [_PICTURE]}]),
    _chat(NotResumable.HIDDEN_IDS, include_reasoning=False, logprobs=True),
    _chat(NotResumable.ENCODER_TRANSFER, ec_transfer_params={"a": 1}),
    _response(EventObstacle.UNCLEAR_STREAM, stream="yes"),
    _response(EventObstacle.BACKGROUND, background=True),
    _response(EventObstacle.STORED, store=True),
    _response(EventObstacle.PREVIOUS_RESPONSE, previous_response_id="resp_1"),
    _response(EventObstacle.SERVER_TOOLS, tools=[{"type": "web_search"}]),
    _response(EventObstacle.LOGPROBS, include=["message.output_text.logprobs"]),
    _response(EventObstacle.MULTIMODAL, input=[{"role": "user", "content": [{"type": "input_image"}]}]),
    _response(EventObstacle.NO_OUTPUT, max_output_tokens=0),
    _response(EventObstacle.ENCODER_TRANSFER, ec_transfer_params={"a": 1}),
    _message(EventObstacle.UNCLEAR_STREAM, stream="yes"),
    _message(EventObstacle.MULTIMODAL, messages=[{"role": "user", "content": [{"type": "image"}]}]),
    _message(EventObstacle.NO_OUTPUT, max_tokens=0),
    _message(EventObstacle.ENCODER_TRANSFER, ec_transfer_params={"a": 1}),
    _generate(GenerateObstacle.UNCLEAR_STREAM, stream="yes"),
    _generate(GenerateObstacle.SEVERAL_CHOICES, sampling_params={"n": 2}),
    _generate(GenerateObstacle.SEVERAL_PROMPTS, text=["x", "y"]),
    _generate(GenerateObstacle.PROMPT_EMBEDS, input_embeds=[[0.1]]),
    _generate(GenerateObstacle.MULTIMODAL, image_data="data:,"),
    _generate(GenerateObstacle.LOGPROBS, return_logprob=True),
    _generate(GenerateObstacle.HIDDEN_STATES, return_hidden_states=True),
    _generate(GenerateObstacle.ENGINE_SESSION, session_params={"id": "s"}),
    _generate(GenerateObstacle.NO_OUTPUT, sampling_params={"max_new_tokens": 0}),
)
