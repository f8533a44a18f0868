"""Choosing the next token: penalties, masks, temperature, and a draw that keeps no state.

Invariant: token i of a session is a function of the logits, the tokens before it, the parameters, the seed and i, and
of nothing else. So a session that goes on elsewhere needs no random state, and neighbours cannot matter. Everything
here runs on the CPU in float32, whatever computed the logits.
"""

import hashlib
from collections.abc import Sequence

import torch

from .output import TokenLogprobs
from .protocol import SamplingParams

_GREEDY_BELOW = 1e-5


def seed_of_session(seed: int | None, name: str) -> int:
    """The seed of a session: the client's, or one that follows from the session's own (random) name.

    A client that gives no seed gets another answer each time, and yet the same one after a failover.
    """
    if seed is not None:
        return seed
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class Sampler:
    """Chooses tokens for one session."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._params = params
        self._seed = seed
        self._generator = torch.Generator("cpu")
        self._ends = torch.tensor(sorted(eos_ids | set(params.stop_token_ids)), dtype=torch.long)
        self._ends = self._ends[self._ends < vocab_size]
        bias = [(token, value) for token, value in params.logit_bias if token < vocab_size]
        self._bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.long)
        self._bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self._in_prompt[torch.tensor(list(prompt_ids), dtype=torch.long)] = True

    def observe(self, token: int) -> None:
        """Count an output token; every one, in order, also those of before a failover."""
        if self._counts is not None:
            self._counts[token] += 1

    def sample(self, raw: torch.Tensor, index: int) -> tuple[int, TokenLogprobs | None]:
        """Output token number `index` from its logits [vocab] (float32, CPU), which are left as they are."""
        logits = self._processed(raw.clone(), index)
        token = self._draw(logits, index)
        return token, self._logprobs(raw, token)

    def _processed(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        params = self._params
        if self._bias_ids.numel():
            logits[self._bias_ids] += self._bias
        if index < params.min_tokens:
            logits[self._ends] = -torch.inf
        if self._counts is not None and self._in_prompt is not None:
            seen = self._counts > 0
            if params.repetition_penalty != 1.0:
                repeated = seen | self._in_prompt
                scale = torch.where(logits > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
                logits = torch.where(repeated, logits * scale, logits)
            logits -= params.frequency_penalty * self._counts
            logits -= params.presence_penalty * seen
        return logits

    def _draw(self, logits: torch.Tensor, index: int) -> int:
        params = self._params
        if params.temperature < _GREEDY_BELOW:
            return int(torch.argmax(logits))
        logits = logits / params.temperature
        if 0 < params.top_k < logits.numel():
            logits[logits < torch.topk(logits, params.top_k).values[-1]] = -torch.inf
        probabilities = torch.softmax(logits, dim=-1)
        if params.min_p > 0.0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
        if params.top_p < 1.0:
            ordered, order = torch.sort(probabilities, descending=True, stable=True)
            # The likeliest tokens up to and including the one that reaches top_p; never none.
            beyond = torch.cumsum(ordered, dim=0) - ordered >= params.top_p * ordered.sum()
            probabilities[order[beyond]] = 0.0
        self._generator.manual_seed(self._seed_of(index))
        # argmax(p / e) with e exponentially distributed draws from p: one pass, no sorting, no sum to round.
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int(torch.argmax(probabilities / noise))

    def _seed_of(self, index: int) -> int:
        text = f"{self._seed}:{index}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def _logprobs(self, raw: torch.Tensor, token: int) -> TokenLogprobs | None:
        wanted = self._params.logprobs
        if wanted is None:
            return None
        logprobs = torch.log_softmax(raw, dim=-1)
        values, ids = torch.topk(logprobs, min(wanted, logprobs.numel())) if wanted else ((), ())
        top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
        return TokenLogprobs(token, float(logprobs[token]), top)
