"""Outputs of the interrupted run become outputs of a request again, before it runs.

Owns what of a request goes with its outputs: placeholders of their logprobs, which the client has, and the grammar that
has accepted them. Invariant: it looks to SGLang like a request that was retracted after those outputs; what they end is
ended here and never computed. It does not touch KV.
"""

from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from ..guard import log


def re_enter(request: Any, outputs: Sequence[int], finish: str, think_end_id: int | None) -> bool:
    """Give a new request its old outputs; whether they end it, or it failed.

    `finish` is what the record of the interrupted run says of an end. Where it says one, and the outputs have none, the
    answer would be told wrongly either way, and where the grammar does not accept them, it would go on wrongly.
    """
    request.output_ids = array("q", outputs)
    if request.return_logprob:
        _placeholders(request, outputs)
    if request.require_reasoning and think_end_id is not None:
        request.update_reasoning_tokens(list(outputs), think_end_id)
    # In SGLang's own order: the last token is looked at for an end before the grammar has seen it.
    if _accepted(request, outputs[:-1]):
        request.update_finish_state()
        if finish and not request.finished():
            fail(request, "midstream: its outputs do not end it as the record of the interrupted run says")
        elif not request.finished():
            _accepted(request, outputs[-1:])
    return bool(request.finished())


def _accepted(request: Any, outputs: Sequence[int]) -> bool:
    if request.grammar is None:
        return True
    try:
        for token in outputs:
            request.grammar.accept_token(token)
            # By this SGLang tells that nothing of a prebuilt request is left to be accepted.
            request.grammar.current_token = token
    except ValueError as error:
        fail(request, f"midstream: the grammar does not accept the outputs of the interrupted run ({error})")
        return False
    return True


def fail(request: Any, text: str) -> None:
    """End a request that has not begun with an error of its own."""
    request.finished_reason = _failure(request, text)


def fail_later(request: Any, text: str) -> None:
    """End a request with an error of its own after its next step, where SGLang frees what it has."""
    request.to_finish = _failure(request, text)


def _failure(request: Any, text: str) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    log.warning("%s (request %s)", text, request.rid)
    return FINISH_ABORT(text, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def _placeholders(request: Any, outputs: Sequence[int]) -> None:
    """Logprobs in the shape that the front end needs. The client has the real ones: the coordinator cuts there."""
    told = request.logprob
    told.output_token_logprobs_val.extend([0.0] * len(outputs))
    told.output_token_logprobs_idx.extend(outputs)
    if told.top_logprobs_num > 0:
        width = told.top_logprobs_num
        told.output_top_logprobs_val.extend([[0.0] * width for _ in outputs])
        told.output_top_logprobs_idx.extend([[token] * width for token in outputs])
    if told.token_ids_logprob is not None:
        told.output_token_ids_logprobs_val.extend([[0.0] * len(told.token_ids_logprob) for _ in outputs])
        told.output_token_ids_logprobs_idx.extend([list(told.token_ids_logprob) for _ in outputs])
