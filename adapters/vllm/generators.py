"""Random state of seeded requests on the V1 model runner: how many draws an output token costs, and going back to one.

Invariant: when a step begins, a request's generator has made exactly as many draws as the request has outputs, wherever
those were produced. CPU only: there a seeded request draws one `randint` a step (TopKTopPSampler.forward_cpu of
0.32).
"""

import functools
import inspect
import weakref
from typing import Any


def draws_are_known(vllm_config: Any) -> bool:
    """Whether a seeded request's random state can be rebuilt here from its seed and the number of its outputs.

    The V2 runner keys its noise by seed and position, so there is nothing to rebuild. Of the V1 runner's samplers only
    that of 0.32 on the CPU is known; 0.25 draws there over the whole vocabulary, and only while everybody in the batch
    has a seed.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        return True
    if vllm_config.device_config.device_type != "cpu":
        return False
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    return "randint" in inspect.getsource(TopKTopPSampler.forward_cpu)


def adopt_generator(state: Any) -> None:
    """Give a request state whose outputs are complete a generator that has made their draws and can take one back."""
    if state.generator is None or state.generator.device.type != "cpu":
        if state.generator is not None and state.output_token_ids:
            raise NotImplementedError("advancing the V1 runner's generator on a GPU is not known for this vLLM")
        return
    state.generator = _rewinding()(state)


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
