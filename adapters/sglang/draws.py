"""What is drawn for a request does not depend on who else is in its batch.

SGLang draws a batch in one of three ways: all greedily; by token, with the noise of a seed laid on tokens; or by rank,
with the noise on the sorted probabilities. The third is taken where any request of the batch limits its choice, which
a greedy one does, too. So a seeded request would go on otherwise beside other requests. Invariant: each row is drawn
as it would be in a batch of its own. Owns the way of a row, and the refusal of what SGLang itself cannot draw.
"""

from typing import Any

from ..guard import guarded, patch
from .settings_of_engine import server_options

_BY_RANK = ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions")


def install_in_scheduler() -> None:
    """Where tokens are drawn."""
    from sglang.srt.layers import sampler

    patch(sampler, "top_k_top_p_min_p_sampling_from_probs_torch", _BY_RANK, _row_by_row)


def install_in_front_end() -> None:
    """Where requests are looked at before they are sent to the scheduler."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    patch(SamplingParams, "verify", ("self", "vocab_size"), _refusing, needed=False)


def _row_by_row(original: Any) -> Any:
    def drawing(probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, need_min_p: Any, seeds: Any, positions: Any) -> Any:
        drawn = original(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions)
        again = _as_if_alone(drawn, probs, top_ks, top_ps, min_ps, seeds, positions)
        return drawn if again is None else again

    return drawing


@guarded(default=None)
def _as_if_alone(drawn: Any, probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, seeds: Any, positions: Any) -> Any:
    """Tokens of a batch, of which those were drawn again that another way would have been taken for."""
    import torch
    from sglang.srt.layers.sampler import sampling_from_probs_torch
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    # Ties are broken as in a batch that is all greedy.
    drawn = torch.where(top_ks <= 1, probs.argmax(dim=-1).to(drawn.dtype), drawn)
    if seeds is None:
        return drawn
    unlimited = (top_ks == TOP_K_ALL) & (top_ps == 1.0) & (min_ps <= 0)
    by_token = sampling_from_probs_torch(probs, seeds, positions).to(drawn.dtype)
    return torch.where(unlimited, by_token, drawn)


def _refusing(original: Any) -> Any:
    def verify(self: Any, vocab_size: Any) -> Any:
        original(self, vocab_size)
        if _ends_the_scheduler(self):
            raise ValueError("min_p cannot be drawn with --enable-deterministic-inference; use top_p or top_k instead.")

    return verify


@guarded(default=False)
def _ends_the_scheduler(params: Any) -> bool:
    """Whether SGLang would take it and die of it, in one worker after the other."""
    return bool(params.min_p > 0 and server_options().enable_deterministic_inference)
