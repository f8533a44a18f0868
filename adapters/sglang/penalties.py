"""Penalties of a request that comes into a batch with outputs: SGLang counts them step by step, and begins with none.

Invariants: the counters of a session's row stand where they stood in the run that made its outputs, and penalizers are
applied in one order in all engines. Other requests' rows are left as SGLang makes them. A penalizer whose counters are
not known here cannot be caught up with, which `all_known` says when the engine starts.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

# In which order they are applied: what is added comes before what multiplies, as in SGLang's overlapped schedule.
KNOWN = (
    "BatchedFrequencyPenalizer",
    "BatchedPresencePenalizer",
    "BatchedMinNewTokensPenalizer",
    "BatchedRepetitionPenalizer",
)


def all_known(sampling_batch_info: Any) -> bool:
    """Whether the penalizers of this SGLang are those that are counted here."""
    source = inspect.getsource(sampling_batch_info.from_schedule_batch)
    return set(re.findall(r"penaltylib\.(Batched\w+Penalizer)", source)) == set(KNOWN)


def put_in_order(orchestrator: Any) -> None:
    """Have a batch's penalizers applied in one order.

    SGLang makes them out of a set of classes: their order is that of addresses in a process, so that one engine
    multiplies what another one adds to first, and says something else.
    """
    made = {type(penalizer).__name__: (kind, penalizer) for kind, penalizer in orchestrator.penalizers.items()}
    orchestrator.penalizers = dict(made[name] for name in KNOWN if name in made) | orchestrator.penalizers


def catch_up(orchestrator: Any, row: int, outputs: Sequence[int]) -> None:
    """Count `outputs` in a row of a batch's penalizers, as if they had come one by one."""
    import torch

    if not orchestrator.is_required or not outputs:
        return
    ids = torch.tensor(list(outputs), dtype=torch.int64, device=orchestrator.device)
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        match type(penalizer).__name__:
            case "BatchedFrequencyPenalizer":
                each = penalizer.frequency_penalties[row].expand(len(ids))
                penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, each)
            case "BatchedPresencePenalizer":
                penalizer.cumulated_presence_penalties[row, ids] = penalizer.presence_penalties[row]
            case "BatchedRepetitionPenalizer":
                penalizer.cumulated_repetition_penalties[row, ids] = penalizer.repetition_penalties[row]
            case "BatchedMinNewTokensPenalizer":
                penalizer.len_output_tokens[row] += len(ids)
            case name:
                raise NotImplementedError(f"the counters of {name} are not known for this SGLang")
