"""What the first request with logprobs would compile in the midst of everybody's decoding: done once, after the start.

vLLM counts ranks with a function that torch compiles when it is first called: on the CPU 4 to 25 s in which a worker
does nothing else. It is compiled here as soon as the model is ready, by a thread of lower priority while the front end
is still starting. Owns nothing; where it fails, the first request pays as it always did. (A first grammar costs 0.6 s
for 49,000 tokens, outside of the decoding thread: vLLM makes its compiler for what the first request asks for, so there
is nothing to make before.)
"""

import os
import threading
from typing import Any

from .guard import guarded, patch

NICENESS = 10
# One row is compiled for itself, two rows for any number of them.
ROW_COUNTS = (1, 2)


def install() -> None:
    """Hook the end of a CPU worker's start."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    patch(CPUWorker, "compile_or_warm_up_model", ("self",), _then_warm, needed=False)


def _then_warm(original: Any) -> Any:
    def compile_or_warm_up_model(self: Any) -> Any:
        times = original(self)
        _start(self)
        return times

    return compile_or_warm_up_model


@guarded(default=None)
def _start(worker: Any) -> None:
    import torch

    threads, vocabulary = torch.get_num_threads(), worker.model_config.get_vocab_size()
    thread = threading.Thread(
        target=guarded(default=None)(_compile), args=(vocabulary, threads), name="midstream-warm", daemon=True
    )
    thread.start()


def _compile(vocabulary: int, threads: int) -> None:
    import torch
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    # What is compiled holds for the number of threads and the kind of tensors that it was compiled with.
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for rows in ROW_COUNTS:
            # No random numbers: those of requests without a seed come from the same source.
            batched_count_greater_than(torch.zeros(rows, vocabulary), torch.zeros(rows, 1))
