"""A fleet that is one process."""

import math
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from contracts.coordination_suite import LEASE_S, NODE, Connect, CoordinationContract

from midstream.sidecar.fleet.coordination import Coordination
from midstream.sidecar.fleet.local import LocalCoordination


class TestLocal(CoordinationContract):
    @pytest_asyncio.fixture
    async def connect(self) -> AsyncIterator[Connect]:
        only = LocalCoordination()

        async def connect() -> Coordination:
            return only

        yield connect
        await only.close()


async def test_its_fence_is_open_without_end() -> None:
    fleet = LocalCoordination()
    joined = await fleet.join(NODE, LEASE_S)
    assert joined.fence_s() == math.inf
    with pytest.raises(ValueError, match="expected"):
        await joined.claim("5" * 32, 2, "nobody")  # type: ignore[arg-type]
    await fleet.close()
