"""What all schedulers of an engine do alike: old outputs become outputs again, and penalties count them.

Several ranks are given the same requests and must make the same batches of them, or what they compute together is
nonsense. So whatever changes a request or a batch is here, hangs on nothing but the request, and is done by each of
them. Owns the side of a scheduler that has no arena: a rank beside the first one, or one whose arena cannot be had.
Invariant: nothing of a session's KV is awaited or kept where there are several ranks; only the first one journals.
"""

from typing import Any

from ...session.marker import Marker
from ..guard import report
from . import penalties
from .marking import checked_marker, has_marker
from .re_entry import fail_later, re_enter


class Follower:
    """A scheduler's side without an arena."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def is_waiting(self) -> bool:
        """Whether a request is on its way in: the scheduler is not idle then."""
        return False

    @property
    def held_tokens(self) -> int:
        """Positions in pages that are in nobody's hands but ours."""
        return 0

    @property
    def held_rows(self) -> int:
        """Rows of requests that are in no batch."""
        return 0

    def arrives(self, request: Any) -> bool:
        """Take a request in before SGLang queues it; True: it is over, and not to be queued."""
        if request.finished() or request.to_finish is not None:
            return False
        marker = checked_marker(request)
        return marker is not None and take_up(self._scheduler, request, marker)

    def before_step(self) -> None:
        """Nothing waits."""

    def before_output(self, requests: list[Any], skipped: Any) -> None:
        """Nothing is journaled."""

    def retracted(self, request: Any) -> None:
        """There is no table to take it from."""

    def aborted(self, message: Any) -> list[Any]:
        """SGLang knows all requests."""
        return []

    def sampling_begins(self, batch: Any, sampling_info: Any) -> None:
        """A batch has new counters of penalties: count the outputs of sessions that come into it with some."""
        penalties.put_in_order(sampling_info.penalizer_orchestrator)
        prebuilt = batch.forward_mode.is_prebuilt()
        for row, request in enumerate(batch.reqs):
            if len(request.output_ids) and has_marker(request):
                # The first decode after a prebuilt batch counts the last one itself.
                outputs = request.output_ids[:-1] if prebuilt else request.output_ids
                try:
                    penalties.catch_up(sampling_info.penalizer_orchestrator, row, outputs)
                except Exception:
                    report("penalties of a session")
                    fail_later(request, "midstream: the penalties of its outputs cannot be counted")

    def pages_cleared(self) -> None:
        """None are held."""


def take_up(scheduler: Any, request: Any, marker: Marker) -> bool:
    """Give a request the outputs that its session has already, and send them; whether they end it."""
    resume = marker.resume
    if resume is None or not resume.outputs:
        return False
    ended = re_enter(request, resume.outputs, resume.finish, scheduler.model_config.think_end_id)
    if ended or request.stream:
        # They go through SGLang's own front end again. Where they are the whole answer nothing is computed.
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    return ended
