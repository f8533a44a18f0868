"""vLLM keeps the contract of all engines."""

import pytest
from contracts.engine_suite import EngineContract, beside, fallen, first, mover, standby

from midstream.adapters.vllm.adapter import VllmAdapter
from midstream.sidecar.environments import VLLM_ENVIRON
from support.beside import EngineUnderTest
from support.vllm_rig import BLOCK_TOKENS, START_S, vllm_command

__all__ = ["beside", "fallen", "first", "mover", "standby"]

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    """vLLM on the CPU with the demo's model."""
    return EngineUnderTest(
        VllmAdapter(),
        tuple(vllm_command()),
        VLLM_ENVIRON,
        model="smollm2",
        block_tokens=BLOCK_TOKENS,
        streams=3,
        start_s=START_S,
    )


class TestVllm(EngineContract):
    """All of them."""
