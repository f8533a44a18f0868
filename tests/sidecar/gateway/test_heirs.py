"""Gateways that go on with the streams of one that has ended: all in one process, before scripted engines."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from midstream.proxy.orphans import KeptPart, Orphan
from midstream.proxy.server import build_app, make_runner
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.presence import Presence
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet.record import Readiness, Record, Role
from midstream.sidecar.fleet_standing import Standing
from midstream.sidecar.fleet_streams import FleetStreams
from midstream.sidecar.gateway.adoption import Adoption
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.node_table import NodeTable
from midstream.sidecar.gateway.verdicts import Verdicts
from midstream.sidecar.metrics import Metrics
from support.answers import Answer
from support.reconnecting import connected, position_in, whole_events
from support.scripted import Fate, Script, ScriptedEngine
from support.storeys import SECRET, Node

ANSWER = Answer.words(40)
KEPT = ProxySettings(reattach_s=30.0)
PATHS = {
    "/v1/completions": {"model": "tiny", "prompt": "x", "stream": True},
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True,
        "stream_options": {"include_usage": True},
    },
}  # fmt: skip


class Fleet:
    """Nodes and gateways that are members of one fleet."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.coordination = LocalCoordination()
        self.nodes: dict[str, Node] = {}
        self._stack = stack
        self._ends: dict[str, AsyncExitStack] = {}
        self.presences: dict[str, Presence] = {}
        self.tables: dict[str, NodeTable] = {}
        self.lost: set[str] = set()
        self.standings: dict[str, Standing] = {}

    async def join(self, name: str, role: Role = Role.GATEWAY) -> None:
        """One enters the fleet."""
        standing = self.standings[name]
        record = Record(name, role, f"http://{name}:1", readiness=Readiness.READY)
        self.presences[name] = await Presence.enter(self.coordination, record, 10, standing.rejoined)
        standing.entered(self.presences[name])

    async def leave(self, name: str) -> None:
        """One leaves it, and has its streams still, as a process does that is told to end."""
        self.standings[name].left()
        if name in self.presences:
            await self.presences.pop(name).close()

    async def _member(
        self, name: str, role: Role, stack: AsyncExitStack, *, wait_s: float = 5, joins: bool = True
    ) -> FleetStreams:
        self.standings[name] = standing = Standing(self.coordination, wait_s)
        if joins:
            await self.join(name, role)
        stack.push_async_callback(self.leave, name)
        streams = FleetStreams(standing, SecretProver(SECRET), SecretBeliever(SECRET), stops_alone=True)
        await stack.enter_async_context(streams.following())
        return streams

    async def node(self, name: str, *scripts: Script) -> Node:
        engine = ScriptedEngine(ANSWER, *scripts, name=name)
        await self._stack.enter_async_context(engine.serving())
        self.nodes[name] = node = Node(name, engine)
        node.settings, node.elsewhere = KEPT, await self._member(name, Role.NODE, self._stack)
        await node.start()
        self._stack.push_async_callback(node.stop)
        return node

    async def gateway(self, name: str, *, wait_s: float = 5, joins: bool = True, settings: ProxySettings = KEPT) -> str:
        """Start one; where it listens."""
        stack = self._ends[name] = AsyncExitStack()
        self._stack.push_async_callback(stack.aclose)
        streams = await self._member(name, Role.GATEWAY, stack, wait_s=wait_s, joins=joins)
        verdicts = await stack.enter_async_context(Verdicts(SecretProver(SECRET)))
        coordinator = GatewayCoordinator(Metrics(), verdicts, takeover_timeout_s=5)
        self.tables[name] = coordinator.nodes
        for node in (node for node in self.nodes.values() if node.name not in self.lost):
            record = Record(node.name, Role.NODE, node.url, readiness=Readiness.READY, slot_count=8)
            coordinator.nodes.heard(node.name, node.url, record, asked_s=0.0)
        standing = streams._standing
        adoption = await stack.enter_async_context(Adoption(standing, streams, coordinator))
        app = build_app(
            coordinator,
            settings,
            elsewhere=streams,
            permits=streams._standing,
            prover=SecretProver(SECRET),
            adopts=adoption,
        )
        runner = make_runner(app, shutdown_timeout_s=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def over(self, node: str) -> None:
        """All gateways know that one is no more."""
        self.lost.add(node)
        for table in self.tables.values():
            table.gone(node, "its lease is over")

    async def end(self, name: str) -> None:
        """One ends, and leaves its streams where they are."""
        await self._ends[name].aclose()

    @property
    def requests(self) -> list[int]:
        """How many each engine had."""
        return [len(node.coordinator.engines[0].seen) for node in self.nodes.values()]


@asynccontextmanager
async def fleets() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        yield fleet
        await stack.aclose()
        await fleet.coordination.close()


async def cut_off(url: str, path: str, after_bytes: int, have: bytes = b"") -> bytes:
    """The whole events that a client gets of its stream, or of the rest of it."""
    headers = {"Content-Type": "application/json", **last_of(have)}
    async with connected(url, "POST", path, json.dumps(PATHS[path]).encode(), headers) as client:
        await client.head()
        assert client.status == 200
        got = await client.read(after_bytes)
        client.cut()
    return whole_events(got)


async def rest(url: str, path: str, have: bytes, *, more: int = 0, policy: str = "best-effort") -> tuple[int, bytes]:
    """What it gets for the same request; it says that it has `more` events than it does."""
    headers = {"Content-Type": "application/json", "X-Midstream-Policy": policy, **last_of(have, more)}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, data=json.dumps(PATHS[path]).encode(), headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def read_until_broken(
    url: str, path: str, have: bytes = b"", *, more: int = 0
) -> tuple[asyncio.Event, "asyncio.Task[bytes]"]:
    """A client that reads until its connection breaks; it is told when the head, or some of a new one, has come."""
    some, got = asyncio.Event(), bytearray()

    async def read() -> bytes:
        headers = {"Content-Type": "application/json", **last_of(have, more)}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url + path, data=json.dumps(PATHS[path]).encode(), headers=headers) as answer,
        ):
            assert answer.status == 200
            if have:
                some.set()
            try:
                while data := await answer.content.readany():
                    got.extend(data)
                    if len(got) > 1_500:
                        some.set()
            except aiohttp.ClientPayloadError:
                return whole_events(bytes(got))
        raise AssertionError("it came to an end")

    return some, asyncio.create_task(read())


def last_of(have: bytes, more: int = 0) -> dict[str, str]:
    """The id of the last event that it has, if any, or says that it has."""
    found = re.search(rb"^id: (.*)\.\d+$", have, re.MULTILINE)
    return {} if found is None else {"Last-Event-ID": f"{found[1].decode()}.{position_in(have) + more}"}


def said(stream: bytes) -> str:
    """Its text, and that its events are numbered without a gap."""
    numbers = [int(number) for number in re.findall(rb"^id: .*\.(\d+)$", stream, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    chunks = [json.loads(data) for data in re.findall(rb"^data: (\{.*\})$", stream, re.MULTILINE)]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@pytest.mark.parametrize("path", PATHS)
async def test_each_heir_says_what_the_first_would_have_said(path: str) -> None:
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.03))
        have = await cut_off(await fleet.gateway("first"), path, 1_500)
        await fleet.end("first")
        # The next one has it for a while, and the one after that has the rest.
        have += await cut_off(await fleet.gateway("second"), path, 2_000, have)
        assert b"[DONE]" not in have
        await fleet.end("second")
        status, more = await rest(await fleet.gateway("third"), path, have)
        assert status == 200
        have += more
        assert said(have) == ANSWER.text()
        assert have.count(b"data: [DONE]\n") == 1
        assert (b'"usage":{' in have) == ("chat" in path)
        assert fleet.requests == [1]


@pytest.mark.parametrize("fate", [Fate.DIES, Fate.ERRS])
async def test_an_heir_goes_on_at_another_node_when_that_one_is_lost(fate: Fate) -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        a = await fleet.node("a", Script(at=30, fate=fate, gap_s=0.08))
        a.coordinator.takeover_refusal = None
        first = await fleet.gateway("first")
        have = await cut_off(first, path, 1_500)
        await fleet.node("b", Script())
        await fleet.end("first")
        second = await fleet.gateway("second")
        asking = asyncio.create_task(rest(second, path, have))
        await asyncio.sleep(0.8)
        await a.lose()
        status, more = await asking
        assert status == 200
        assert said(have + more) == ANSWER.text()
        assert fleet.requests == [1, 1]
        [(_, _, outputs, unseen)] = fleet.nodes["b"].coordinator.of("take_in")
        assert not unseen
        assert outputs == ANSWER.ids[: len(outputs)]
        fleet.over("a")
        # Of what the second node says nobody could make the same stream again: another heir has nothing.
        await fleet.end("second")
        third = await fleet.gateway("third")
        assert (await rest(third, path, have))[0] == 410


async def test_two_heirs_at_once_are_one_and_a_way_to_it() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.02))
        first = await fleet.gateway("first")
        have = await cut_off(first, path, 1_500)
        await fleet.end("first")
        urls = [await fleet.gateway(name) for name in ("second", "third")]
        got = await asyncio.gather(*(rest(url, path, have) for url in urls))
        whole = [more for status, more in got if status == 200]
        # Those names are no hosts here: who lost the claim would have passed it on there.
        assert [status for status, _ in got if status != 200] == [503]
        assert said(have + whole[0]) == ANSWER.text()
        assert fleet.requests == [1]


@pytest.mark.parametrize("policy", ["best-effort", "exact"])
async def test_nobody_goes_on_elsewhere_with_what_was_not_heard_again(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    path, adopt = "/v1/completions", Adoption.adopt
    async with fleets() as fleet:
        a = await fleet.node("a", Script(gap_s=0.1))
        first = await fleet.gateway("first")
        have = await cut_off(first, path, 1_500)
        await fleet.node("b", Script())
        await fleet.end("first")
        second = await fleet.gateway("second")

        async def and_lost(self: Adoption, token: str, digest: str) -> Orphan | str | None:
            found = await adopt(self, token, digest)
            await a.lose()
            return found

        # Its node has answered that it has the stream, and is lost before it says any of it again.
        monkeypatch.setattr(Adoption, "adopt", and_lost)
        status, answer = await rest(second, path, have, policy=policy)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "stream_out_of_reach")
        assert fleet.requests == [1, 0]
        # While that one may come back that is no last word; then nobody has it any more.
        monkeypatch.setattr(Adoption, "adopt", adopt)
        assert (await rest(second, path, have, policy=policy))[0] == 503
        fleet.over("a")
        assert (await rest(second, path, have, policy=policy))[0] == 410
        assert fleet.requests == [1, 0]


async def test_a_node_that_is_lost_while_it_says_a_stream_again_breaks_the_connection_and_ends_no_answer() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        a = await fleet.node("a", Script(gap_s=0.1))
        first = await fleet.gateway("first")
        have = await cut_off(first, path, 1_500)
        await fleet.node("b", Script())
        await fleet.end("first")
        second = await fleet.gateway("second")
        # More than the node has said when it is lost.
        some, reading = read_until_broken(second, path, have, more=25)
        await some.wait()
        await a.lose()
        assert await reading == b""
        assert fleet.requests == [1, 0]


async def test_who_comes_back_while_its_stream_is_said_again_waits_for_what_follows() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.08))
        have = await cut_off(await fleet.gateway("first"), path, 1_500)
        await fleet.end("first")
        second = await fleet.gateway("second")
        some, reading = read_until_broken(second, path, have, more=20)
        await some.wait()
        # It has lost some of what it had: that is known when all was heard.
        assert (await rest(second, path, have))[0] == 503
        status, more = await rest(second, path, have, more=20)
        assert status == 200
        assert int(re.findall(rb"^id: .*\.(\d+)$", more, re.MULTILINE)[0]) == position_in(have) + 21
        assert more.endswith(b"\n\n")
        assert b"[DONE]" in more
        assert await reading == b""
        assert fleet.requests == [1]


async def test_an_answer_that_ends_before_what_its_client_says_it_has_does_not_look_whole() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.01))
        have = await cut_off(await fleet.gateway("first"), path, 1_500)
        await fleet.end("first")
        with pytest.raises(aiohttp.ClientPayloadError):
            await rest(await fleet.gateway("second"), path, have, more=1_000)


async def test_a_gateway_that_leaves_has_nobody_forget_what_its_readers_go_on_with_elsewhere() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.06))
        some, reading = read_until_broken(await fleet.gateway("first"), path)
        await some.wait()
        await fleet.leave("first")
        have = await reading
        # Whatever it would have said to the node has been said by now.
        await asyncio.sleep(0.2)
        await fleet.end("first")
        status, more = await rest(await fleet.gateway("second"), path, have)
        assert status == 200
        assert said(have + more) == ANSWER.text()
        assert fleet.requests == [1]


async def test_nor_has_one_that_was_without_a_lease_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.06))
        first = await fleet.gateway("first", wait_s=0.3)
        membership, is_open = fleet.presences["first"].membership, [True]

        async def opened() -> bool:
            return is_open[0] or await asyncio.Event().wait()

        monkeypatch.setattr(membership, "may_send", lambda: is_open[0])
        monkeypatch.setattr(membership, "opened", opened)
        some, reading = read_until_broken(first, path)
        await some.wait()
        is_open[0] = False
        have = await reading
        await asyncio.sleep(0.2)
        await fleet.end("first")
        status, more = await rest(await fleet.gateway("second"), path, have)
        assert status == 200
        assert said(have + more) == ANSWER.text()


async def test_a_stream_goes_by_the_lease_under_which_it_was_claimed_also_where_that_came_while_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, found = "/v1/completions", Adoption._found
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.15))
        have = await cut_off(await fleet.gateway("first"), path, 1_500)
        await fleet.end("first")
        second = await fleet.gateway("second", joins=False)

        async def and_joined(self: Adoption, token: str) -> tuple[str, KeptPart] | None:
            await fleet.join("second")
            return await found(self, token)

        monkeypatch.setattr(Adoption, "_found", and_joined)
        some, reading = read_until_broken(second, path, have)
        await some.wait()
        await fleet.leave("second")
        assert b"[DONE]" not in await reading


async def test_a_name_that_was_invented_costs_nobody_the_answer_that_is_kept() -> None:
    path = "/v1/completions"
    async with fleets() as fleet:
        await fleet.node("a", Script())
        url = await fleet.gateway("first", settings=replace(KEPT, reattach_streams_max=1))
        status, whole = await rest(url, path, b"")
        assert status == 200
        invented = b"data: x\nid: 0011223344556677~" + b"A" * 22 + b".1\n\n"
        assert (await rest(url, path, invented))[0] == 410
        assert (await rest(url, path, whole[: whole.index(b"\n\n") + 2]))[0] == 200


async def test_whoever_has_claimed_a_stream_goes_on_with_it_also_for_a_client_that_came_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, adopt = "/v1/completions", Adoption.adopt
    async with fleets() as fleet:
        await fleet.node("a", Script(gap_s=0.02))
        have = await cut_off(await fleet.gateway("first"), path, 1_500)
        await fleet.end("first")
        second, third = await fleet.gateway("second"), await fleet.gateway("third")
        record = Record("second", Role.GATEWAY, second, readiness=Readiness.READY)
        fleet.presences["second"].update(record)

        async def in_vain(self: Adoption, token: str, digest: str) -> Orphan | str | None:
            await adopt(self, token, digest)
            raise Refused("stream_out_of_reach", "its client has left")

        monkeypatch.setattr(Adoption, "adopt", in_vain)
        assert (await rest(second, path, have))[0] == 503
        monkeypatch.setattr(Adoption, "adopt", adopt)
        status, more = await rest(third, path, have)
        assert status == 200
        assert said(have + more) == ANSWER.text()
        assert fleet.requests == [1]
