"""Sidecars for the end-to-end tests: one for each test, or one that is kept through all tests of a module."""

import os
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest
import pytest_asyncio

from support.etcd_server import VARIABLE as ETCD_VARIABLE
from support.etcd_server import binary as etcd_binary
from support.host_fleet import HostFleet, host_fleets
from support.hosts import why_not
from support.sidecars import MODEL_VARIABLE, PYTHON_VARIABLE, Sidecar, engine_command, sidecars_started


@pytest.fixture(scope="session")
def command() -> list[str]:
    """How the embedded engine is started with its tiny model."""
    python, model = os.environ.get(PYTHON_VARIABLE), os.environ.get(MODEL_VARIABLE)
    if not python or not model:
        pytest.skip(f"{PYTHON_VARIABLE} and {MODEL_VARIABLE} name no engine; `make test` sets them")
    return engine_command(python, model)


@pytest.fixture(scope="module")
def kept(command: list[str]) -> Iterator[Callable[[], Sidecar]]:
    """The sidecar of the module, started when first asked for."""
    started: list[Sidecar] = []

    def get() -> Sidecar:
        if not started:
            started.append(Sidecar(command).start())
        return started[0]

    yield get
    for sidecar in started:
        sidecar.stop()


@pytest.fixture
def start(command: list[str]) -> Iterator[Callable[..., Sidecar]]:
    """Starts sidecars for one test alone; options are those of `Sidecar`, among them another `command`."""
    with sidecars_started(command) as start:
        yield start


@pytest.fixture
def host_fleet(command: list[str]) -> Iterator[Callable[..., HostFleet]]:
    """Makes fleets for one test alone, on hosts that are namespaces; options are those of `HostFleet`."""
    if reason := why_not():
        pytest.skip(reason)
    if etcd_binary() is None:
        pytest.skip(f"{ETCD_VARIABLE} names no etcd; `make test` sets it")
    with host_fleets(command) as make:
        yield make


@pytest.fixture(params=["kept", "fresh"])
def sidecar(request: pytest.FixtureRequest, kept: Callable[[], Sidecar], start: Callable[..., Sidecar]) -> Sidecar:
    """A sidecar with two workers. What tests before did to the kept one must not matter."""
    return kept() if request.param == "kept" else start()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client that never waits for more than a minute."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session
