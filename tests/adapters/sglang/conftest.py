"""What tests of SGLang share."""

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that never waits for more than six minutes, which two starts of an engine can take."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(360)) as session:
        yield session
