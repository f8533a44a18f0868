"""Fixtures of tests that run whole sidecars with the embedded engine: a conftest imports those that its tests use."""

import os
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest
import pytest_asyncio

from midstream.sidecar.control_client import ControlClient
from support.moving import Stage
from support.sidecars import MODEL, MODEL_VARIABLE, PYTHON_VARIABLE, Sidecar, engine_command, sidecars_started


@pytest.fixture(scope="session")
def command() -> list[str]:
    """How the embedded engine is started with its tiny model."""
    python, model = os.environ.get(PYTHON_VARIABLE), os.environ.get(MODEL_VARIABLE)
    if not python or not model:
        pytest.skip(f"{PYTHON_VARIABLE} and {MODEL_VARIABLE} name no engine; `make test` sets them")
    return engine_command(python, model)


@pytest.fixture(scope="module")
def sidecar(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Two workers that can take each other's sessions, and a store that is written to when asked."""
    store = tmp_path_factory.mktemp("store")
    sidecar = Sidecar(command, workers=2, settings={"store.snapshot_every_s": 3600}, store=store)
    yield sidecar.start()
    sidecar.stop()


@pytest.fixture
def start(command: list[str]) -> Iterator[Callable[..., Sidecar]]:
    """Starts sidecars for one test alone; options are those of `Sidecar`."""
    with sidecars_started(command) as start:
        yield start


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client that never waits for more than three minutes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(180)) as session:
        yield session


@pytest_asyncio.fixture
async def stage(sidecar: Sidecar, http: aiohttp.ClientSession) -> AsyncIterator[Stage]:
    """The module's sidecar, ready."""
    async with ControlClient(sidecar.process.state_dir) as control:
        stage = Stage(sidecar.process, http, control, MODEL, quiet=True)
        await stage.ready()
        yield stage
