"""A client's request as the proxy understands it, and as it goes to an engine. Pure: randomness is an argument.

Invariant: nothing that a client writes reaches the engine as a marker, and what goes out differs from what came in only
by the marker, `return_token_ids` and an assigned seed.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..session.marker import FIELD, Marker, with_marker
from .dialects.by_path import GENERATE_PATH, OtherApi
from .dialects.generate import Generate
from .dialects.hiding import Hiding
from .eligible_generate import params_of
from .orphans import Origin, with_origin
from .splice import Wishes

# Where engines read transfer fields from, apart from the request itself: paths of objects within a body.
_SMUGGLING_PLACES: tuple[tuple[str, ...], ...] = (
    (),
    ("vllm_xargs",),
    ("extra_args",),
    ("sampling_params",),
    ("sampling_params", "extra_args"),
    ("extra_body",),
)


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a request; ValueError says what is wrong with it."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the request body is JSON, but not an object: {raw[:40]!r}")
    return body


def without_transfer_fields(body: dict[str, Any]) -> dict[str, Any]:
    """A body without anything that engines would take for a marker. The same object if there is nothing to remove."""
    for place in _SMUGGLING_PLACES:
        body = _without(body, place)
    return body


def _without(body: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    if not place:
        return {k: v for k, v in body.items() if k != FIELD} if FIELD in body else body
    inner = body.get(place[0])
    if not isinstance(inner, dict):
        return body
    cleaned = _without(inner, place[1:])
    return body if cleaned is inner else {**body, place[0]: cleaned}


def may_hold_transfer_fields(raw: bytes) -> bool:
    """Whether it is worth while to decode a body: the field's name is there, or could be in escapes."""
    return FIELD.encode() in raw or b"\\u00" in raw


def wishes_of(body: dict[str, Any], *, chat: bool, hiding: Hiding | None, events: OtherApi | None = None) -> Wishes:
    """What a client asked for, as far as it shapes the stream."""
    if events is not None:
        return Wishes(chat=False, hiding=None, shows_ids=isinstance(events, Generate), events=events)
    options = body.get("stream_options")
    stops = bool(body.get("stop"))
    return Wishes(
        chat=chat,
        hiding=None if body.get("return_token_ids") is True else hiding,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        stop_strings=stops,
        holds_back=stops or bool(body.get("tools")) or "reasoning_effort" in body,
        # With hidden reasoning vLLM withholds the ids of all chunks.
        shows_ids=body.get("include_reasoning") is not False,
    )


# vLLM reads -1 as a request without a seed (`SamplingParams.__post_init__`).
NO_SEED = (None, -1)


def samples(body: dict[str, Any], path: str = "") -> bool:
    """Whether a request may draw its tokens at random: whoever does not say otherwise, does."""
    temperature = (params_of(body) if path == GENERATE_PATH else body).get("temperature")
    return not (isinstance(temperature, int | float) and temperature == 0)


def wants_seed(body: dict[str, Any], path: str = "", *, takes_seed: bool = True) -> bool:
    """Whether a request samples at random without saying how. What an API has no field for says nothing."""
    if path == GENERATE_PATH:
        has_seed = params_of(body).get("sampling_seed") is not None
    else:
        has_seed = takes_seed and body.get("seed") not in NO_SEED
    return not has_seed and samples(body, path)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request on its way to engines: the same for every attempt, but for the marker.

    `asks_ids`: the API has a field for that. `takes_seed`: it has one for seeds; otherwise the marker carries it.
    """

    body: dict[str, Any]
    seed: int | None
    asks_ids: bool = True
    takes_seed: bool = True

    def encode(self, marker: Marker | None, origin: Origin | None = None) -> bytes:
        """The body for one attempt, which tells a node whose stream its answer is a part of.

        Without a marker it goes out as the client wrote it: nothing can be done with its ids.
        """
        body = self.body
        if marker is not None:
            if not self.takes_seed:
                marker = replace(marker, seed=self.seed)
            body = with_marker(body, marker)
            if origin is not None:
                body = with_origin(body, origin)
            if self.asks_ids:
                body["return_token_ids"] = True
        if self.seed is not None and self.takes_seed:
            body = {**body, "seed": self.seed}
        return msgspec.json.encode(body)


def encode_body(body: dict[str, Any]) -> bytes:
    """A request body as JSON."""
    return msgspec.json.encode(body)
