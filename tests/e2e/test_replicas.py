"""A killed worker's session goes on from another node's memory: a whole sidecar, an engine, and a peer over TLS."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e.test_tiers import PROMPT, PROMPT_TOKENS, SAMPLED, killed_at

from support.peers import Fleet, ReplicaProcess, make_fleet, start_replicas
from support.sidecars import Sidecar, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return make_fleet(tmp_path / "fleet")


@pytest.fixture
def peer(fleet: Fleet) -> Iterator[ReplicaProcess]:
    process = start_replicas("--memory-bytes", str(256 << 20), *fleet.flags, peer=True, writer="peer")
    yield process
    process.close()


def settings_for(fleet: Fleet, peer: ReplicaProcess) -> dict[str, Any]:
    return {
        "restore.tiers": "replica", "store.snapshot_every_s": 0.05, "store.tail_every_tokens": 8,
        "fleet.name": "here", **fleet.settings,
        "replicas.to": f"peer://127.0.0.1:{peer.port}",
    }  # fmt: skip


async def figure(http: aiohttp.ClientSession, sidecar: Sidecar, name: str) -> float | None:
    async with http.get(f"{sidecar.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


async def test_a_session_goes_on_exactly_from_a_peers_memory(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession, tmp_path: Path, fleet: Fleet, peer: ReplicaProcess
) -> None:
    store = tmp_path / "store"
    sidecar = await asyncio.to_thread(start, settings=settings_for(fleet, peer), store=store)
    body = {**SAMPLED, "prompt": PROMPT, "max_tokens": 480}
    wanted = await sidecar.stream(http, body)
    answer, told = await killed_at(sidecar, http, body, 200, store=store)
    assert answer.same_as(wanted)
    assert (told["outcome"], told["tier"]) == ("exact", "replica"), told
    assert 0 < told["kv_tokens_loaded"] == PROMPT_TOKENS + told["cut"] - 1
    deadline = time.monotonic() + 10
    while not await figure(http, sidecar, "midstream_replicas_peer_snapshots_sent"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert await figure(http, sidecar, "midstream_replicas_up") == 1
    assert await figure(http, sidecar, "midstream_replicas_restore_offered_peer")

    # Without the peer it is computed again, and nothing waits for the network.
    await sidecar.ready(http)
    peer.kill()
    answer, told = await killed_at(sidecar, http, body, 200, store=store)
    require_whole(answer)
    assert told["outcome"] == "recomputed"
    assert answer.token_ids[:200] == wanted.token_ids[:200]
    await sidecar.ready(http)
