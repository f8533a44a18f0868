"""Where the scheduler side is called from. Each hook is a guest: what fails in it stays in it.

Owns the one scheduler side of this process. Functions are replaced on SGLang's classes, after a look at their
parameters, before the scheduler is made.
"""

from typing import Any

from ..guard import guarded, log, patch, report
from ..plugin_settings import plugin_settings
from . import overlap
from .follower import Follower
from .scheduler_side import SchedulerSide

_side: Follower | None = None


def install() -> None:
    """Hook the scheduler of this process."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    overlap.install()
    patch(Scheduler, "_add_request_to_queue", ("self", "req", "is_retracted"), _arriving)
    patch(Scheduler, "get_next_batch_to_run", ("self",), _stepping)
    patch(Scheduler, "abort_request", ("self", "recv_req"), _aborting)
    patch(Scheduler, "is_fully_idle", ("self", "for_health_check"), _not_idle)
    patch(SchedulerOutputStreamer, "stream_output", ("self", "reqs", "return_logprob", "skip_req"), _journaling)
    patch(Req, "reset_for_retract", ("self",), _retracting)
    patch(SamplingBatchInfo, "from_schedule_batch", ("batch", "vocab_size"), _counting)
    patch(PagedTokenToKVPoolAllocator, "clear", ("self",), _clearing)
    patch(SchedulerPoolStatsObserver, "session_held_tokens", ("self",), _with_held("held_tokens"))
    patch(SchedulerPoolStatsObserver, "session_held_req_count", ("self",), _with_held("held_rows"))
    # Last, so that what the others miss is known when the facts are published.
    patch(Scheduler, "__init__", ("self", "server_args", "port_args"), _starting)


def _starting(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _start(self)

    return __init__


def _start(scheduler: Any) -> None:
    global _side
    settings = plugin_settings()
    if settings is None:
        return
    # Ranks do alike whatever changes batches, also where the first one gets no arena.
    _side = Follower(scheduler)
    if settings.arena is None:
        log.warning("midstream: no arena is named; nothing is journaled")
        return
    if _is_first(scheduler):
        try:
            _side = SchedulerSide(settings, scheduler, lambda request: _enqueue(scheduler, request))
        except Exception:
            report("start of the scheduler side")


def _is_first(scheduler: Any) -> bool:
    """Whether this is the scheduler that journals; an arena has one writer."""
    return not (scheduler.ps.tp_rank or scheduler.ps.pp_rank or scheduler.ps.dp_rank)


_original_enqueue: Any = None


def _enqueue(scheduler: Any, request: Any) -> None:
    _original_enqueue(scheduler, request)


def _arriving(original: Any) -> Any:
    global _original_enqueue
    _original_enqueue = original

    def _add_request_to_queue(self: Any, req: Any, is_retracted: bool = False) -> Any:
        if _side is None or is_retracted or not _arrives(_side, req):
            return original(self, req, is_retracted)
        return None

    return _add_request_to_queue


@guarded(default=False)
def _arrives(side: Follower, request: Any) -> bool:
    return side.arrives(request)


def _stepping(original: Any) -> Any:
    def get_next_batch_to_run(self: Any) -> Any:
        if _side is not None:
            overlap.settle(self, session_waits=_side.is_waiting)
            _before_step(_side)
        return original(self)

    return get_next_batch_to_run


@guarded(default=None)
def _before_step(side: Follower) -> None:
    side.before_step()


def _aborting(original: Any) -> Any:
    def abort_request(self: Any, recv_req: Any) -> Any:
        if _side is not None:
            _abort(self, _side, recv_req)
        return original(self, recv_req)

    return abort_request


@guarded(default=None)
def _abort(scheduler: Any, side: Follower, message: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    for request in side.aborted(message):
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid), request)


def _not_idle(original: Any) -> Any:
    def is_fully_idle(self: Any, for_health_check: bool = False) -> bool:
        if _side is not None and _side.is_waiting and not for_health_check:
            return False
        return bool(original(self, for_health_check))

    return is_fully_idle


def _journaling(original: Any) -> Any:
    def stream_output(self: Any, reqs: Any, return_logprob: Any, skip_req: Any = None) -> Any:
        if _side is not None:
            _before_output(_side, reqs, skip_req)
        return original(self, reqs, return_logprob, skip_req)

    return stream_output


@guarded(default=None)
def _before_output(side: Follower, requests: Any, skipped: Any) -> None:
    side.before_output(requests, skipped)


def _retracting(original: Any) -> Any:
    def reset_for_retract(self: Any) -> Any:
        if _side is not None:
            _retracted(_side, self)
        return original(self)

    return reset_for_retract


@guarded(default=None)
def _retracted(side: Follower, request: Any) -> None:
    side.retracted(request)


def _counting(original: Any) -> Any:
    def from_schedule_batch(batch: Any, vocab_size: Any) -> Any:
        made = original(batch, vocab_size)
        if _side is not None:
            _count(_side, batch, made)
        return made

    return from_schedule_batch


@guarded(default=None)
def _count(side: Follower, batch: Any, sampling_info: Any) -> None:
    side.sampling_begins(batch, sampling_info)


def _clearing(original: Any) -> Any:
    def clear(self: Any) -> Any:
        result = original(self)
        if _side is not None:
            _cleared(_side)
        return result

    return clear


@guarded(default=None)
def _cleared(side: Follower) -> None:
    side.pages_cleared()


def _with_held(what: str) -> Any:
    """What SGLang counts as held by sessions, with what is held here."""

    def make(original: Any) -> Any:
        def counted(self: Any) -> int:
            return int(original(self)) + (0 if _side is None else getattr(_side, what))

        return counted

    return make
