"""An HTTP client for real engines on a busy machine."""

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that never waits for more than three minutes."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(180)) as session:
        yield session
