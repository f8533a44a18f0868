"""The sidecar's marker on its way through SGLang: from the HTTP process to the scheduler, and read off a request there.

It travels in `sampling_params.custom_params`, as text because SGLang sends no deeper objects between its processes,
which clients may write into as well: its name there is drawn by the engine's first process and inherited by the others,
so that nobody outside knows it. Invariant: what comes with a marker that cannot be true runs as a new request.
"""

import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ...session.marker import Marker

_VARIABLE = "MIDSTREAM_SGLANG_FIELD"


def draw_field() -> None:
    """In the engine's first process, before it starts others: draw the name."""
    os.environ.setdefault(_VARIABLE, f"midstream-{secrets.token_hex(16)}")


def field() -> str:
    """The marker's name in `custom_params`."""
    return os.environ[_VARIABLE]


def with_marker(params: Mapping[str, Any], marker: Marker) -> dict[str, Any]:
    """Sampling parameters with the marker, and with its seed where there is none."""
    custom = {**(params.get("custom_params") or {}), field(): json.dumps(marker.to_json(), separators=(",", ":"))}
    marked = {**params, "custom_params": custom}
    if marked.get("sampling_seed") is None and marker.seed is not None:
        marked["sampling_seed"] = marker.seed
    return marked


def has_marker(request: Any) -> bool:
    """Whether a scheduler's request has a marker, whatever it says."""
    fields = request.sampling_params.custom_params
    return isinstance(fields, dict) and field() in fields


def marker_of(request: Any) -> Marker | None:
    """The marker of a scheduler's request, or None; ValueError if there is one that cannot be read."""
    fields = request.sampling_params.custom_params
    text = fields.get(field()) if isinstance(fields, dict) else None
    return None if text is None else Marker.from_json(json.loads(text))


def checked_marker(request: Any) -> Marker | None:
    """The marker of a request whose outputs this model could have written, or None; ValueError says what is wrong.

    The request's limit is known by now, and no longer than the model's context.
    """
    marker = marker_of(request)
    if marker is None or marker.resume is None:
        return marker
    outputs, limit = marker.resume.outputs, request.sampling_params.max_new_tokens
    if request.vocab_size is not None and max(outputs, default=0) >= request.vocab_size:
        raise ValueError(f"marker: token id {max(outputs)} is none of this model's {request.vocab_size}")
    if len(outputs) > limit:
        raise ValueError(f"marker: {len(outputs)} outputs are more than the {limit} that the request may have")
    return marker
