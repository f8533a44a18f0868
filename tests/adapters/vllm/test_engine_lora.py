"""Two real vLLM workers with adapters: KV belongs to the adapter's weights, and goes nowhere without them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.told import Told, differences, tell
from support.vllm_models import RANK, write_adapter
from support.vllm_rig import ASK_REPORT, CHAT, Rig, chat, shallow_model

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

STORY = "Write a long story about a dog named Max."
CUT = 14
SESSION = "X-Midstream-Session"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters for the demo's model, of different weights."""
    model, folder = shallow_model(), tmp_path_factory.mktemp("adapters")
    return write_adapter(model, folder / "one", 1), write_adapter(model, folder / "two", 2)


@pytest.fixture(scope="module")
def rig(adapters: tuple[Path, Path]) -> Iterator[Rig]:
    """Two workers that load adapters while they run, have one from the start, and cache no prefixes."""
    rig = Rig(
        "--no-enable-prefix-caching", "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2",
        "--lora-modules", f"both={adapters[0]}", workers=2, environ={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    )  # fmt: skip
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


def body(adapter: str) -> dict[str, Any]:
    """A streamed request to an adapter."""
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return chat(STORY, **{"model": adapter, "max_tokens": 36, **more})


async def load(http: aiohttp.ClientSession, worker: dict[str, Any], name: str, path: Path) -> None:
    """Have one worker load an adapter."""
    told = {"lora_name": name, "lora_path": str(path)}
    async with http.post(f"{worker['url']}/v1/load_lora_adapter", json=told) as answer:
        assert answer.status == 200, await answer.text()


async def moved(
    rig: Rig, http: aiohttp.ClientSession, adapter: str, headers: dict[str, str]
) -> tuple[Told, list[dict[str, Any]]]:
    """The answer of a session that was moved, and what came of it."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    url = rig.sidecar.url + CHAT
    answer = asyncio.create_task(
        tell(http, url, body(adapter), on_headers=lambda told: begun.set_result(told[SESSION]), **ASK_REPORT, **headers)
    )
    async with ControlClient(rig.sidecar.state_dir) as control:
        session = await begun
        await control.move(SessionId(session), at=CUT)
    told = await answer
    return told, next(s["outcomes"] for s in await rig.sidecar.sessions(http) if s["session"] == session)


async def plain(rig: Rig, http: aiohttp.ClientSession, adapter: str) -> Told:
    """The undisturbed answer."""
    return await tell(http, rig.sidecar.url + CHAT, body(adapter), **ASK_REPORT)


async def test_a_session_with_an_adapter_goes_on_exactly(rig: Rig, http: aiohttp.ClientSession) -> None:
    wanted = await plain(rig, http, "both")
    assert wanted.done, wanted
    assert wanted.ids != (await plain(rig, http, "smollm2")).ids, "the adapter changes nothing"
    got, [outcome] = await moved(rig, http, "both", {"X-Midstream-Policy": "exact"})
    assert (outcome["outcome"], outcome["tier"], outcome["tokens_recomputed"]) == ("exact", "held", 1), outcome
    assert differences(wanted, got, within=1e-5) == []


async def test_other_weights_under_the_same_name_take_no_kv(
    rig: Rig, http: aiohttp.ClientSession, adapters: tuple[Path, Path]
) -> None:
    workers = await rig.sidecar.workers(http)
    for worker, path in zip(workers, adapters, strict=True):
        await load(http, worker, "differs", path)
    got, [outcome] = await moved(rig, http, "differs", {})
    assert got.done, got
    assert (outcome["outcome"], outcome["kv_tokens_loaded"]) == ("recomputed", 0), outcome
    # Who insists on exactness is told, and gets nothing of what other weights would say.
    wanted = await plain(rig, http, "differs")
    got, outcomes = await moved(rig, http, "differs", {"X-Midstream-Policy": "exact"})
    assert got.error is not None, (got, outcomes)
    assert got.ids == wanted.ids[: len(got.ids)]


async def test_a_standby_without_the_adapter_breaks_no_session(
    rig: Rig, http: aiohttp.ClientSession, adapters: tuple[Path, Path]
) -> None:
    # Whoever has the least to do and comes first by name gets the session.
    first = min(await rig.sidecar.workers(http), key=lambda worker: str(worker["name"]))
    await load(http, first, "one-only", adapters[1])
    wanted = await plain(rig, http, "one-only")
    assert wanted.done, wanted
    got, outcomes = await moved(rig, http, "one-only", {})
    assert not any(o["kv_tokens_loaded"] and o["worker"] != first["name"] for o in outcomes), outcomes
    assert got.done, (got, outcomes)
    assert got.ids[:CUT] == wanted.ids[:CUT]
