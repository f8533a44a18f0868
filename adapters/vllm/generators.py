"""Random state of seeded requests on the V1 model runner: how many draws an output token costs, and going back to one.

Invariant: when a step begins, a request's generator has made exactly as many draws as the request has outputs, wherever
those were produced. On the CPU (0.32) a seeded request draws one `randint` a step, on a GPU (0.25) one row of
exponentials as wide as the vocabulary: there a draw moves the generator's offset by a number that is always the same.
"""

import functools
import inspect
import weakref
from typing import Any

# By what a row of exponentials moves a CUDA generator, if all of it is drawn at once; vLLM takes it back by
# this number, too. The smallest cards that serve models draw so many at once.
OFFSET_OF_ROW = 4
VOCABULARY_MAX = 160_000


def draws_are_known(vllm_config: Any) -> bool:
    """Whether a seeded request's random state can be rebuilt here from its seed and the number of its outputs.

    The V2 runner keys its noise by seed and position, so there is nothing to rebuild. Of the V1 runner's samplers those
    of 0.32 on the CPU and of 0.25 on a GPU are known; 0.25 draws on the CPU over the whole vocabulary, and only while
    everybody in the batch has a seed.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        return True
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    if vllm_config.device_config.device_type == "cpu":
        return "randint" in inspect.getsource(ops.TopKTopPSampler.forward_cpu)
    if vllm_config.device_config.device_type == "cuda":
        row_by_row = "q[i].exponential_(generator=generator)" in inspect.getsource(ops.random_sample)
        return row_by_row and int(vllm_config.model_config.get_vocab_size()) <= VOCABULARY_MAX
    return False


def adopt_generator(state: Any) -> None:
    """Give a request state whose outputs are complete a generator that has made their draws and can take one back."""
    if state.generator is None:
        return
    kind = state.generator.device.type
    if kind == "cpu":
        state.generator = _rewinding()(state)
    elif kind == "cuda" and state.output_token_ids:
        if (found := _offset_of_row(state.generator.device)) != OFFSET_OF_ROW:
            raise NotImplementedError(f"a draw moves this card's generators by {found}, not by {OFFSET_OF_ROW}")
        state.generator.set_offset(OFFSET_OF_ROW * len(state.output_token_ids))
    elif state.output_token_ids:
        raise NotImplementedError(f"advancing the V1 runner's generator on {kind} is not known for this vLLM")


@functools.cache
def _offset_of_row(device: Any) -> int:
    """By what one draw of the widest vocabulary moves a generator of this card."""
    import torch

    generator = torch.Generator(device=device)
    torch.empty(VOCABULARY_MAX, device=device).exponential_(generator=generator)
    return int(generator.get_offset())


@functools.cache
def _rewinding() -> Any:
    """The class is made when torch is there, which not every process of the engine has loaded."""
    import torch

    class RewindingGenerator(torch.Generator):
        """A CPU generator that can drop a draw.

        vLLM 0.32 samples a token for each chunk of a prefill but the last, throws it away and takes the draw back
        with `set_offset(get_offset() - 4)`. A CPU generator has no offset: it raises, and the engine dies of any seeded
        request whose prompt is prefilled in pieces. Draws follow from the seed and the number of outputs, so going
        back is drawing them again.
        """

        def __new__(cls, state: Any) -> Any:
            return super().__new__(cls, device="cpu")

        def __init__(self, state: Any) -> None:
            self._state = weakref.ref(state)
            self._seed = state.generator.initial_seed()
            self.set_offset(0)

        def get_offset(self) -> int:
            """There is none; what matters is that `set_offset` follows."""
            return 0

        def set_offset(self, offset: int) -> None:
            """Back to where the request's outputs are, whatever was drawn beyond them."""
            state = self._state()
            self.manual_seed(self._seed)
            for _ in range(0 if state is None else len(state.output_token_ids)):
                torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)

    return RewindingGenerator
