"""SGLang keeps the contract of all engines."""

from typing import Any

import pytest
from contracts.engine_suite import EngineContract, beside, fallen, first, mover, standby

from midstream.adapters.sglang.adapter import SglangAdapter
from midstream.session.marker import Marker
from midstream.sidecar.environments import SGLANG_ENVIRON
from support.beside import EngineUnderTest
from support.sglang_rig import BLOCK_TOKENS, FORKED, START_S, sglang_command

__all__ = ["beside", "fallen", "first", "mover", "standby"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


class WithoutEnd(SglangAdapter):
    """The suite counts tokens, and this model would end its answers when it has nothing more to say."""

    def submit(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        return super().submit({**body, "ignore_eos": True}, marker)

    def resume(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        return super().resume({**body, "ignore_eos": True}, marker)


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    """SGLang on the CPU with the demo's model, in deterministic mode."""
    return EngineUnderTest(
        WithoutEnd(),
        tuple(sglang_command()),
        {**SGLANG_ENVIRON, **FORKED},
        model="smollm2",
        block_tokens=BLOCK_TOKENS,
        streams=3,
        start_s=START_S,
    )


class TestSglang(EngineContract):
    """All of them."""
