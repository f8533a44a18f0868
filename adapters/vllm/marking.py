"""Reading the sidecar's marker off vLLM's request objects, in whichever process they are.

Invariant: front end and core come to the same verdict about a marker, because both ask `checked_marker`; where it is
not good the request runs as if it had none, and the core, which counts that, takes it away before a worker sees it.
"""

from typing import Any

from ...session.marker import FIELD, NAME, Marker, Resume


def marker_of(sampling_params: Any) -> Marker | None:
    """The marker in `SamplingParams.extra_args`, or None; ValueError if there is one that cannot be read."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    fields = extra.get(FIELD)
    body = fields.get(NAME) if isinstance(fields, dict) else None
    return None if body is None else Marker.from_json(body)


def checked_marker(request: Any, model_config: Any) -> Marker | None:
    """The marker of a request whose outputs this model could have written, or None; ValueError says what is wrong."""
    marker = marker_of(request.sampling_params)
    if marker is None or marker.resume is None:
        return marker
    outputs, vocabulary = marker.resume.outputs, model_config.get_vocab_size()
    if max(outputs, default=0) >= vocabulary:
        raise ValueError(f"marker: token id {max(outputs)} is none of this model's {vocabulary}")
    if len(outputs) > (room := outputs_max(request, model_config)):
        raise ValueError(f"marker: {len(outputs)} outputs are more than the {room} that the request may have")
    return marker


def outputs_max(request: Any, model_config: Any) -> int:
    """With how many outputs a request is complete, by its own limit and the model's context."""
    limit = request.sampling_params.max_tokens
    room = int(model_config.max_model_len) - len(request.prompt_token_ids or ())
    return room if limit is None else min(int(limit), room)


def ending_of(request: Any, resume: Resume, model_config: Any) -> str:
    """How the answer ends with the outputs that it has; "" when it goes on.

    A context that is full ends it as surely as `max_tokens` does, and only the engine knows that.
    """
    if not resume.finish and len(resume.outputs) >= outputs_max(request, model_config):
        return "length"
    return resume.finish


def re_enter_outputs(request: Any, model_config: Any) -> Marker | None:
    """In the core: the marker of a new request, whose old outputs are outputs of it from now on. ValueError.

    The request then looks like a preempted one: penalties, limits and stop checks count its outputs as outputs. This
    must be done even where nothing can be recorded, because the front end replays them.
    """
    if request.sampling_params is None:
        return None
    try:
        marker = checked_marker(request, model_config)
    except ValueError:
        request.sampling_params.extra_args.pop(FIELD, None)
        raise
    if marker is not None and marker.resume is not None and marker.resume.outputs:
        request.append_output_token_ids(list(marker.resume.outputs))
        request.prefill_stats = None
    return marker


def resumed_outputs(sampling_params: Any) -> list[int]:
    """Output ids that a resumed request re-enters; [] for any other request."""
    marker = marker_of(sampling_params)
    return list(marker.resume.outputs) if marker is not None and marker.resume is not None else []
