"""A node and what its gateways ask of it: who is believed, and which of two requests for a session stays."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from midstream.proxy import sessions as sessions_module
from midstream.proxy.sessions import GENERATIONS_OF_A_GATEWAY, owners_of
from midstream.session.marker import KvSource, Marker, Resume, with_marker
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from support.answers import Answer
from support.scripted import Fate, Script, ScriptedEngine
from support.storeys import SECRET, Node

ANSWER = Answer.words(12)
PATH = "/v1/completions"
S: Any = "5" * 32
STALLS = Script(at=5, fate=Fate.STALLS)


class Gateway:
    """Asks a node by hand."""

    def __init__(self, node: Node, http: aiohttp.ClientSession, secret: bytes = SECRET) -> None:
        self.node, self.http = node, http
        self.prover = SecretProver(secret)

    async def ask(self, generation: int, outputs: tuple[int, ...] = (), **changes: str) -> tuple[int, str]:
        resume = Resume(outputs, KvSource.NONE, "0" * 32) if outputs else None
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "stream": True}
        raw = json.dumps(with_marker(body, Marker(S, generation, resume))).encode()
        signed = {"method": "POST", "target": PATH, **changes}
        headers = {"Content-Type": "application/json", **self.prover.headers(signed["method"], signed["target"], raw)}
        if "body" in changes:
            raw = raw.replace(b'"x"', b'"y"')
        async with self.http.post(self.node.url + PATH, data=raw, headers=headers) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def one(*scripts: Script, node: Node | None = None) -> AsyncIterator[Gateway]:
    """A node, and a gateway."""
    node = node or Node("a", ScriptedEngine(ANSWER, *scripts, name="a"))
    engine = node.coordinator.engines[0]
    async with engine.serving(), aiohttp.ClientSession() as http:
        await node.start()
        try:
            yield Gateway(node, http)
        finally:
            await node.stop()


async def test_a_later_owners_request_ends_the_earlier_one_first() -> None:
    async with one(STALLS, Script()) as gateway:
        calls = gateway.node.coordinator.calls
        first = asyncio.create_task(gateway.ask(1))
        await gateway.node.coordinator.engines[0].meets_fate.wait()
        status, text = await gateway.ask(2, tuple(ANSWER.ids[:5]))
        assert (status, text.rstrip().endswith("[DONE]")) == (200, True)
        with pytest.raises(aiohttp.ClientError):
            await first
        assert [call[0] for call in calls if call[0] in ("admit", "take_in", "ended")] == [
            "admit", "ended", "take_in", "ended",
        ]  # fmt: skip


async def test_an_earlier_owners_request_that_comes_late_changes_nothing() -> None:
    async with one(STALLS) as gateway:
        later = asyncio.create_task(gateway.ask(2, tuple(ANSWER.ids[:2])))
        await gateway.node.coordinator.engines[0].meets_fate.wait()
        for generation in (1, 2):
            status, text = await gateway.ask(generation)
            assert (status, json.loads(text)["error"]["code"]) == (503, "superseded")
        assert not later.done()
        assert gateway.node.coordinator.open_count == 1
        later.cancel()


async def test_of_many_requests_for_a_session_the_last_owners_stays() -> None:
    async with one(STALLS) as gateway:
        asked = [asyncio.create_task(gateway.ask(generation)) for generation in (3, 1, 5, 2, 4)]
        await asyncio.sleep(0.5)
        open_ones = [task for task in asked if not task.done()]
        assert open_ones == [asked[2]]
        assert gateway.node.coordinator.open_max == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_one_that_does_not_end_makes_the_next_one_ask_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_ENDS_WITHIN_S", 0.1)
    async with one(STALLS) as gateway:
        deaf = asyncio.Event()
        ended = gateway.node.coordinator.ended
        admit = gateway.node.coordinator.admit

        async def never_ends(facts: Any) -> Any:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await deaf.wait()
            return await admit(facts)

        gateway.node.coordinator.admit = never_ends  # type: ignore[method-assign]
        first = asyncio.create_task(gateway.ask(1))
        await asyncio.sleep(0.1)
        status, text = await gateway.ask(2)
        assert (status, json.loads(text)["error"]["code"]) == (503, "still_ending")
        assert not gateway.node.coordinator.of("admit")
        deaf.set()
        first.cancel()
        assert ended is not None
        await asyncio.gather(first, return_exceptions=True)


async def test_generations_of_all_owners_fit_and_never_meet() -> None:
    last = 0
    for generation in (1, 2, 3, GENERATIONS_OF_A_GATEWAY - 1, GENERATIONS_OF_A_GATEWAY):
        first, until = owners_of(generation)
        assert last < first <= until < 1 << 32
        last = until
    async with one(Script()) as gateway:
        assert (await gateway.ask(GENERATIONS_OF_A_GATEWAY))[0] == 200
        status, text = await gateway.ask(GENERATIONS_OF_A_GATEWAY + 1)
        assert (status, "generation" in text) == (400, True)


async def test_a_node_whose_owners_are_used_up_gives_the_session_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_OWNERS_OF_A_NODE", 2)
    dies = [ScriptedEngine(ANSWER, Script(at=at, fate=Fate.DIES), name="a") for at in (2, 4, 6)]
    node = Node("a", *dies)
    async with dies[1].serving(), dies[2].serving(), one(node=node) as gateway:
        status, text = await gateway.ask(1)
        assert (status, "takeovers_exhausted" in text) == (200, True)
        assert [len(engine.seen) for engine in dies] == [1, 1, 0]


@pytest.mark.parametrize("change", [{"target": "/v1/chat/completions"}, {"method": "GET"}, {"body": "changed"}])
async def test_a_request_that_is_not_the_one_that_was_signed_is_refused(change: dict[str, str]) -> None:
    async with one(Script()) as gateway:
        status, text = await gateway.ask(1, **change)
        assert (status, json.loads(text)["error"]["code"]) == (401, "not_of_the_fleet")
        assert not gateway.node.coordinator.of("admit")


async def test_another_secret_is_refused_and_told_to_the_nodes_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async with one(Script()) as gateway:
        stranger = Gateway(gateway.node, gateway.http, b"another secret, of somebody else")
        with caplog.at_level("WARNING"):
            answers = [await stranger.ask(1) for _ in range(3)]
        assert {status for status, _ in answers} == {401}
        assert caplog.text.count("event=not_of_the_fleet remote=127.0.0.1") == 1
        assert "another secret" in caplog.text
        assert not gateway.node.coordinator.of("admit")


async def test_a_node_whose_clock_is_an_hour_off_says_so_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    node = Node("a", ScriptedEngine(ANSWER), believer=SecretBeliever(SECRET, clock=lambda: time.time() + 3600))
    async with one(node=node) as gateway:
        with caplog.at_level("WARNING"):
            assert (await gateway.ask(1))[0] == 401
        assert "3600 s off; set the clocks" in caplog.text
