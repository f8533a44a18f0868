"""Front end: a resumed request first replays its old outputs through vLLM's own output processing.

So detokenizer, stop matcher, logprobs shapes, parsers and usage are rebuilt by the code that built them before; the
proxy drops what the client already has. A request whose answer is already complete gets its ending here and never
reaches the core.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ...session.marker import Resume
from ..guard import log, patch, report
from .marking import checked_marker, ending_of
from .piecewise import kept_apart, needs_pieces
from .prompt_tail import begin_with_tail

# Requests that are being added, and what is to be replayed of them.
_due: dict[str, Resume] = {}


class _Ended(Exception):
    """Within vLLM's adding of a request: the replay has come to its answer's end, and the core is not to hear of it."""


def install() -> None:
    """Hook `OutputProcessor.add_request` and `AsyncLLM._add_request`."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    if patch(OutputProcessor, "add_request", ("self", "request", "prompt"), _replaying):
        patch(AsyncLLM, "_add_request", ("self", "request", "prompt", "parent_req", "index", "queue"), _ending)


def taken_in(request: Any, model_config: Any) -> Resume | None:
    """Take a request's marker in: its seed becomes the request's own, and what is to be replayed is returned.

    None also for a marker that the core will refuse, and count, for the same reason.
    """
    if request.sampling_params is None:
        return None
    try:
        marker = checked_marker(request, model_config)
    except ValueError as error:
        log.warning("midstream: %s; the request runs as a new one", error)
        return None
    if marker is None:
        return None
    if marker.seed is not None and request.sampling_params.seed is None:
        request.sampling_params.seed = marker.seed
    if marker.resume is None or not marker.resume.outputs:
        return None
    return replace(marker.resume, finish=ending_of(request, marker.resume, model_config))


def _replaying(original: Any) -> Any:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        resume = _due.pop(request.request_id, None)
        try:
            if resume is not None:
                _replay(self, request, resume)
        except Exception:
            report("replay")
        if resume is not None and request.request_id not in self.request_states:
            raise _Ended

    return add_request


def _replay(processor: Any, request: Any, resume: Resume) -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    state = processor.request_states[request.request_id]
    begin_with_tail(state.detokenizer, request.prompt_token_ids)
    if state.stats is not None:
        # Statistics of the first token divide by times that only a first step would set.
        state.stats.first_token_ts = state.stats.last_token_ts = time.monotonic()
    finish = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(resume.finish)
    last = resume.outputs[-1]
    params = request.sampling_params
    stopped_by_id = (
        finish is FinishReason.STOP and last in (params.stop_token_ids or ()) and last != params.eos_token_id
    )

    def process(outputs: tuple[int, ...], *, is_last: bool) -> None:
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(outputs),
            new_logprobs=_logprobs(getattr(params, "num_logprobs", params.logprobs), outputs),
            finish_reason=finish if is_last else None,
            stop_reason=last if is_last and stopped_by_id else None,
        )
        processor.process_outputs([output])

    apart = state.queue is not None and needs_pieces(params)
    if not (apart or params.stop):
        process(resume.outputs, is_last=True)
        return
    with kept_apart(state.queue) if apart else nullcontext():
        for count, token in enumerate(resume.outputs, 1):
            # A stop string may end the request before its last token.
            if request.request_id in processor.request_states:
                process((token,), is_last=count == len(resume.outputs))


def _logprobs(wanted: int | None, outputs: tuple[int, ...]) -> Any:
    """Logprobs in the shape that the front end needs. The client has the real ones: the coordinator cuts there."""
    if wanted is None:
        return None
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    width = max(wanted, 0) + 1
    ids = np.repeat(np.asarray(outputs, np.int64)[:, None], width, 1)
    return LogprobsLists(ids, np.zeros((len(outputs), width), np.float32), np.ones(len(outputs), np.int64))


def _ending(original: Any) -> Any:
    async def _add_request(self: Any, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
        resume = None
        try:
            resume = taken_in(request, self.model_config)
        except Exception:
            report("resume record")
        if resume is None:
            await original(self, request, prompt, parent_req, index, queue)
            return
        _due[request.request_id] = resume
        try:
            await original(self, request, prompt, parent_req, index, queue)
        except _Ended:
            # Be it that it was said to be over, or that the replay has found a stop string.
            return
        finally:
            _due.pop(request.request_id, None)

    return _add_request
