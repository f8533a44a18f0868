"""A real vLLM beside a sidecar that is not there, with an arena that is none and a pool that nobody keeps, serves."""

from collections.abc import Iterator

import aiohttp
import pytest

from midstream.loadtest.client import read_stream
from midstream.session.ports import free_port
from support.vllm_by_hand import ByHand
from support.vllm_rig import CHAT, chat

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    """An engine for which nothing of what it was told is true."""
    folder = tmp_path_factory.mktemp("faults")
    arena = folder / "1.arena"
    arena.write_bytes(b"MIDARENA" + bytes(200_000))
    told = {
        "MIDSTREAM_WORKER": "a",
        "MIDSTREAM_EPOCH": "2",
        "MIDSTREAM_HOLDER": str(folder / "holder.sock"),
        "MIDSTREAM_ARENA": str(arena),
        "MIDSTREAM_ADOPT": str(folder / "gone.arena"),
    }
    engine = ByHand(folder, "a", free_port(), told)
    try:
        engine.start()
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


async def test_an_engine_serves_on_with_nothing_that_it_was_told_of(
    engine: ByHand, http: aiohttp.ClientSession
) -> None:
    url = engine.url + CHAT
    body = chat("Write a long story about a dog named Max.", max_tokens=16)
    plain = await read_stream(http, url, body)
    assert plain.whole, plain
    record = {"outputs": plain.token_ids[:5], "kv": "held", "prompt_hash": "0" * 32}
    marker = {"v": 1, "session": "ab" * 16, "generation": 2, "resume": record}
    # Nothing is recorded, but where the outputs are re-entered is the request's own business.
    resumed = await read_stream(http, url, {**body, "kv_transfer_params": {"midstream": marker}})
    assert resumed.whole, resumed
    assert resumed.same_as(plain)
    log = engine.log.read_text(errors="replace")
    assert "serving goes on without it" in log
    assert "not an arena, or its header is damaged" in log
