"""Token ids of many prompts on their way to the GPU, in less of the core's time.

The V2 model runner makes one tensor of the ids of all requests that join a step, out of a list, one Python integer
after the other: 6 ms for 128,000 of them, which all sessions of a dead worker wait for together. NumPy takes a third of
that for the same tensor. And the tensor wants memory of a size that was never asked for before, pinned and on the card,
just while the driver takes a dead engine's context down: so torch has some of each size from the start.
Owns nothing; where the functions are other ones, or anything fails, vLLM's own way is taken.
"""

from typing import Any

from ..guard import guarded, patch, report

# Below that there is nothing to gain.
LONG = 4096
# The sizes that torch's allocator of pinned memory has classes for; the largest holds a million ids.
PINNED_BYTES = tuple(1 << power for power in range(12, 23))
# As many as can be on their way at once.
PINNED_COUNT = 2


def install() -> None:
    """Hook what brings lists to the GPU, in a process of the engine that may have a worker in it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu_worker import Worker

    patch(Worker, "compile_or_warm_up_model", ("self",), with_room, needed=False)
    patch(buffer_utils, "async_tensor_h2d", ("data", "device", "dtype"), of_arrays, needed=False)


def with_room(original: Any) -> Any:
    """The same, with some memory left over at its end."""

    def compile_or_warm_up_model(self: Any) -> Any:
        found = original(self)
        guarded(default=None)(_have_room)()
        return found

    return compile_or_warm_up_model


def _have_room() -> None:
    import torch

    # Given back at once, which is when the allocators keep it.
    pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in PINNED_BYTES for _ in range(PINNED_COUNT)]
    on_card = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (PINNED_BYTES[0], PINNED_BYTES[-1])]
    del pinned, on_card


def of_arrays(original: Any) -> Any:
    """The same with long lists of whole numbers as arrays."""
    import numpy as np
    import torch

    dtypes = {torch.int32: np.int32, torch.int64: np.int64}

    def async_tensor_h2d(data: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            dtype = kwargs["dtype"] if "dtype" in kwargs else args[1] if len(args) > 1 else None
            if type(data) is list and len(data) >= LONG and dtype in dtypes:
                data = np.fromiter(data, dtypes[dtype], len(data))
        except Exception:
            report("staging of token ids")
        return original(data, *args, **kwargs)

    return async_tensor_h2d
