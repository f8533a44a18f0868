"""vLLM keeps the contract of all engines."""

from typing import Any

import pytest
from contracts.engine_suite import EngineContract, beside, fallen, first, mover, standby

from midstream.adapters.vllm.adapter import VllmAdapter
from midstream.session.marker import Marker
from midstream.sidecar.environments import VLLM_ENVIRON
from support import forking
from support.beside import EngineUnderTest
from support.vllm_rig import BLOCK_TOKENS, START_S, vllm_command

__all__ = ["beside", "fallen", "first", "mover", "standby"]

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]


class WithoutEnd(VllmAdapter):
    """The suite counts tokens, and this model would end its answers when it has nothing more to say."""

    def submit(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        return super().submit({**body, "ignore_eos": True}, marker)

    def resume(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        return super().resume({**body, "ignore_eos": True}, marker)


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    """vLLM on the CPU with the demo's model."""
    return EngineUnderTest(
        WithoutEnd(),
        tuple(vllm_command("--max-model-len", "2048")),
        {**VLLM_ENVIRON, forking.VARIABLE: "1"},
        model="smollm2",
        block_tokens=BLOCK_TOKENS,
        streams=3,
        start_s=START_S,
    )


class TestVllm(EngineContract):
    """All of them."""
