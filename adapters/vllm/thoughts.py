"""How much of its budget for thoughts a session has spent, when it is taken up in the midst of them or behind them.

vLLM counts the budget along with the outputs, step by step, and what it remembers is more than what the outputs say at
their end: a second train of thought would be cut short elsewhere. Invariant: the counter of a request that comes into a
batch with outputs stands where it stood in the run that made them. Owns nothing.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from ..guard import patch, report


def install() -> None:
    """Hook the coming of requests into a worker's batch, where this vLLM has such a budget."""
    with contextlib.suppress(ImportError):
        from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

        patch(ThinkingBudgetStateHolder, "sync_batch", ("self", "batch_update"), _catching_up)


def _catching_up(original: Any) -> Any:
    def sync_batch(self: Any, batch_update: Any) -> None:
        original(self, batch_update)
        if not batch_update:
            return
        try:
            for _, _, _, outputs in batch_update.added:
                # By its outputs and not by its row: rows were moved since it was added.
                state = next((s for s in self._state.values() if s.get("output_tok_ids") is outputs), None)
                if outputs and state is not None:
                    catch_up(self, state, outputs)
        except Exception:
            report("budget of thoughts")

    return sync_batch


def catch_up(holder: Any, state: dict[str, Any], outputs: Sequence[int]) -> None:
    """Have vLLM's own counter pass over old outputs; what follows them is counted by the next step."""
    marks = {*holder.think_start_token_ids, *holder.think_end_token_ids}
    try:
        for count in steps(outputs, marks):
            state["output_tok_ids"] = list(outputs[:count])
            state["spec_token_ids"], state["force_index"] = [], []
            holder._update_think_state(state)
    finally:
        # Wherever that ended, what the request writes from here on must be seen.
        state["output_tok_ids"], state["force_index"] = outputs, []


def steps(outputs: Sequence[int], marks: set[int]) -> list[int]:
    """With how many outputs something happened: before and after each token that begins or ends thoughts.

    Between them the counter only counts, and it counts the same in one step as in many.
    """
    found = {0}
    for index, token in enumerate(outputs):
        if token in marks:
            found |= {index, index + 1}
    return sorted(count for count in found if count < len(outputs))
