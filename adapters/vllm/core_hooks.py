"""Engine core and workers: what must happen to a resumed request where no connector hook reaches.

* the journal is written between the scheduler's update and the moment its outputs leave the core;
* a grammar is advanced when it is made over those old outputs that it governs: not over thoughts;
* the V1 model runner's request state gets the old outputs, and its random generator the draws they cost.
"""

import contextlib
from typing import Any

from ..guard import guarded, patch, report
from .generators import adopt_generator
from .group import step_of
from .marking import resumed_outputs


def install() -> None:
    """Install the three hooks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    patch(Scheduler, "update_from_output", ("self", "scheduler_output", "model_runner_output"), _journaling)
    patch(StructuredOutputManager, "_create_grammar", ("self", "request"), _advanced_grammar)
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        patch(CachedRequestState, "__post_init__", ("self",), _with_outputs)


@guarded(default=None)
def _begin(side: Any) -> None:
    side.step_begins()


@guarded(default=None)
def _end(side: Any, outputs: Any, scheduler_output: Any) -> None:
    side.step_ends(outputs, step_of(scheduler_output))


def _journaling(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        side = getattr(getattr(self, "connector", None), "scheduler_side", None)
        if side is None:
            return original(self, scheduler_output, model_runner_output)
        _begin(side)
        outputs = None
        try:
            outputs = original(self, scheduler_output, model_runner_output)
        finally:
            _end(side, outputs, scheduler_output)
        return outputs

    return update_from_output


def _advanced_grammar(original: Any) -> Any:
    def _create_grammar(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        try:
            governed = _governed(self, request, resumed_outputs(request.sampling_params))
            accepted = not governed or grammar.accept_tokens(request.request_id, governed)
        except Exception:
            report("grammar of a resumed request")
            accepted = False
        if not accepted:
            # A grammar at the wrong place would write a wrong answer; vLLM fails this one request for it.
            raise ValueError("midstream: the grammar does not accept the outputs of the interrupted run")
        return grammar

    return _create_grammar


def _governed(manager: Any, request: Any, outputs: list[int]) -> list[int]:
    """Those of the old outputs that the grammar has seen. Where a parser tells thoughts apart it begins after them."""
    if not outputs or getattr(manager, "reasoner_cls", getattr(manager, "reasoner", None)) is None:
        return outputs
    if hasattr(manager, "_get_constraint_bounds"):
        begin, _ = manager._get_constraint_bounds(request, outputs, spec_tokens_committed=True)
    else:
        begin = _end_of_thoughts(manager, request, outputs)
    if begin > len(outputs):
        return []
    # From here on the manager feeds the grammar every token, as it did in the interrupted run.
    request.structured_output_request.reasoning_ended = True
    return outputs[begin:]


def _end_of_thoughts(manager: Any, request: Any, outputs: list[int]) -> int:
    """0.25: which output the grammar begins with, asked step by step as it was when they were written.

    More than there are outputs: the thoughts have not ended. What ends them is none of the grammar's.
    """
    if manager.should_fill_bitmask(request):
        return 0
    reasoner = manager._get_reasoner(request)
    known = list(request.prompt_token_ids or ())
    for count, token in enumerate(outputs, 1):
        known.append(token)
        if reasoner.is_reasoning_end_streaming(known, [token]):
            return count
    return len(outputs) + 1


def _with_outputs(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        original(self)
        try:
            outputs = resumed_outputs(self.sampling_params) if self.sampling_params is not None else []
            if outputs and not self.output_token_ids:
                self.output_token_ids = outputs
            adopt_generator(self)
        except Exception:
            report("request state of a resumed request")

    return __post_init__
