"""The embedded engine keeps the contract of all engines."""

from pathlib import Path

import pytest
from contracts.engine_suite import EngineContract, beside, fallen, first, mover, standby

from midstream.adapters.transformers.adapter import SERVER_MODULE, TransformersAdapter
from support.beside import EngineUnderTest

__all__ = ["beside", "fallen", "first", "mover", "standby"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engine(python: str, tiny: Path) -> EngineUnderTest:
    """The embedded engine with its tiny model."""
    argv = (python, "-m", SERVER_MODULE, "--model", str(tiny), "--served-model-name", "tiny", "--threads", "1")
    return EngineUnderTest(TransformersAdapter(), argv, {}, model="tiny", block_tokens=16, streams=3)


class TestTransformers(EngineContract):
    """All of them."""
