"""A tiny model, and the interpreter of the embedded engine's environment."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from support.embedded import PYTHON_VARIABLE, Bench


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has torch and transformers."""
    found = os.environ.get(PYTHON_VARIABLE)
    if not found:
        pytest.skip(f"{PYTHON_VARIABLE} names no interpreter with torch and transformers")
    return found


@pytest.fixture(scope="session")
def tiny(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([python, "-m", "midstream.adapters.transformers.tiny", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def bench(python: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A holder, and what is started beside it."""
    bench = Bench(tmp_path_factory.mktemp("bench"), python, tiny)
    yield bench
    bench.close()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client that never waits for more than a minute."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session
