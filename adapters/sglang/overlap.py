"""SGLang's overlapped schedule, in which a step is launched before the results of the one before it are looked at.

Owns when that one is brought to its end first: where a session is on its way in, because pages and rows that were just
freed are still written to by a step that is under way, and writers of other processes do not queue behind it; and where
penalties are counted, because SGLang would count a token one step late or twice, by what else there is to do.
Invariant: its loop finds as many results as it expects. Results are processed by SGLang's own function, and what fails
in there is SGLang's own.
"""

from typing import Any

from ..guard import guarded, patch

# In the place of results that were processed: SGLang's loop takes them, and there is nothing to do.
_DONE = object()
_installed = False


def install() -> None:
    """Have processed results skipped."""
    global _installed
    from sglang.srt.managers.scheduler import Scheduler

    _installed = patch(Scheduler, "process_batch_result", ("self", "batch", "result"), _skipping)


def settle(scheduler: Any, *, session_waits: bool) -> None:
    """Bring the step that is under way to its end, if the next one is not to overlap with it."""
    if _must_wait(scheduler, session_waits):
        batch, result = scheduler.result_queue[0]
        scheduler.result_queue[0] = (batch, _DONE)
        scheduler.process_batch_result(batch, result)


@guarded(default=False)
def _must_wait(scheduler: Any, session_waits: bool) -> bool:
    if not (_installed and scheduler.enable_overlap):
        return False
    queue: Any = getattr(scheduler, "result_queue", None)
    if not queue or len(queue) != 1 or queue[0][1] is _DONE:
        return False
    return session_waits or any(_counts(batch) for batch in (scheduler.running_batch, scheduler.last_batch))


def _counts(batch: Any) -> bool:
    """Whether a request of a batch has penalties, or a least length, which SGLang counts with them."""
    sampling = None if batch is None or not batch.reqs else batch.sampling_info
    return sampling is not None and bool(sampling.penalizer_orchestrator.is_required)


def _skipping(original: Any) -> Any:
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        return None if result is _DONE else original(self, batch, result)

    return process_batch_result
