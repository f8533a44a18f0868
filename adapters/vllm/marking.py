"""Reading the sidecar's marker off vLLM's request objects, in whichever process they are."""

from typing import Any

from ...session.marker import FIELD, NAME, Marker


def marker_of(sampling_params: Any) -> Marker | None:
    """The marker in `SamplingParams.extra_args`, or None; ValueError if there is one that cannot be read."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    body = (extra.get(FIELD) or {}).get(NAME)
    return None if body is None else Marker.from_json(body)


def resumed_outputs(sampling_params: Any) -> list[int]:
    """Output ids that a resumed request re-enters; [] for any other request."""
    marker = marker_of(sampling_params)
    return list(marker.resume.outputs) if marker is not None and marker.resume is not None else []
