"""What a node keeps of gateways' streams, who may have it, and which gateway goes on with the stream of one that is no
more."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from midstream.proxy.orphans import LOOK, KeptPart, Origin, Orphan, code_of_this, with_origin
from midstream.proxy.reattach_elsewhere import SENT_ON, STREAMS_PATH
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import CoordinationError, Refused
from midstream.session.ids import Generation, SessionId
from midstream.session.marker import Marker, with_marker
from midstream.sidecar import fleet_standing
from midstream.sidecar.fleet.coordination import Claim, ClaimAnswer, Membership
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.presence import Presence
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet.record import Readiness, Record, Role
from midstream.sidecar.fleet_standing import Standing
from midstream.sidecar.fleet_streams import FleetStreams, prefix_of_member
from midstream.sidecar.gateway.adoption import ANSWER_S, Adoption
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.verdicts import Verdicts
from midstream.sidecar.metrics import Metrics
from support.answers import Answer
from support.scripted import Fate, Script, ScriptedEngine
from support.storeys import SECRET, Node

ANSWER = Answer.words(30)
PATH = "/v1/completions"
S = SessionId("5" * 32)
KEPT = ProxySettings(reattach_s=30.0)
NAME = "A" * 22


class Site:
    """A fleet with one node that keeps what it says to gateways, and whoever asks it."""

    def __init__(self, node: Node, fleet: LocalCoordination, http: aiohttp.ClientSession) -> None:
        self.node, self.fleet, self.http = node, fleet, http
        self.prover = SecretProver(SECRET)
        self.engine = node.coordinator.engines[0]
        self.presences: dict[Membership, Presence] = {}

    async def member(self, name: str, role: Role = Role.GATEWAY) -> tuple[Standing, Membership]:
        standing = Standing(self.fleet, 5)
        record = Record(name, role, f"http://{name}:1", readiness=Readiness.READY)
        presence = await Presence.enter(self.fleet, record, 10, standing.rejoined)
        standing.entered(presence)
        self.presences[presence.membership] = presence
        return standing, presence.membership

    async def lose(self, member: Membership) -> None:
        await self.presences.pop(member).close()

    def proof(self, method: str, target: str) -> dict[str, str]:
        return dict(self.prover.headers(method, target, b"", name=SENT_ON))

    @asynccontextmanager
    async def ask(self, origin: Origin, generation: int = 1) -> AsyncIterator[aiohttp.ClientResponse]:
        """As a gateway does."""
        body = with_marker({"model": "tiny", "prompt": "x", "stream": True}, Marker(S, generation))
        raw = json.dumps(with_origin(body, origin)).encode()
        headers = {"Content-Type": "application/json", **self.prover.headers("POST", PATH, raw)}
        async with self.http.post(self.node.url + PATH, data=raw, headers=headers) as answer:
            yield answer

    async def look(self, token: str) -> tuple[int, Any]:
        path = STREAMS_PATH + token
        async with self.http.get(self.node.url + path, headers={LOOK: "1", **self.proof("GET", path)}) as answer:
            return answer.status, await answer.json()

    async def forget(self, token: str, owner: str) -> int:
        path = f"{STREAMS_PATH}{token}?owner={owner}"
        async with self.http.delete(self.node.url + path, headers=self.proof("DELETE", path)) as answer:
            return answer.status

    async def begun(self, origin: Origin, generation: int = 1) -> bytes:
        """A gateway is cut off after some tokens."""
        async with self.ask(origin, generation) as answer:
            got = b""
            while got.count(b'"text"') < 5:
                got += await answer.content.readany()
            answer.close()
        return got


@asynccontextmanager
async def site(script: Script | None = None, settings: ProxySettings = KEPT) -> AsyncIterator[Site]:
    fleet = LocalCoordination()
    node = Node("a", ScriptedEngine(ANSWER, script or Script(gap_s=0.01), name="a"))
    node.settings = settings
    async with node.coordinator.engines[0].serving(), aiohttp.ClientSession() as http:
        made = Site(node, fleet, http)
        standing, _ = await made.member("a", Role.NODE)
        node.elsewhere = FleetStreams(standing, SecretProver(SECRET), SecretBeliever(SECRET))
        await node.start()
        try:
            yield made
        finally:
            await node.stop()
            for member in tuple(made.presences):
                await made.lose(member)
            await fleet.close()


def origin_of(owner: Membership, code: str = "") -> Origin:
    return Origin(f"{prefix_of_member(owner.id)}~{NAME}", "0" * 32, owner.id, code or code_of_this())


async def test_all_that_was_said_to_a_gateway_is_had_by_the_next_one_from_the_first_word_on() -> None:
    async with site() as here:
        _, one = await here.member("one")
        _, other = await here.member("other")
        origin = origin_of(one)
        have = await here.begun(origin)
        assert await here.look(origin.token) == (200, KeptPart(origin, S, 1, None).to_json())
        async with here.ask(replace(origin, owner=other.id, adopts=True)) as answer:
            whole = await answer.content.read()
        assert whole.startswith(have)
        assert (whole.count(b'"text"'), whole.endswith(b"data: [DONE]\n\n")) == (len(ANSWER.pieces), True)
        assert b"\nid:" not in whole
        # No engine was asked again, and it is the other gateway's now.
        assert len(here.engine.seen) == 1
        assert (await here.look(origin.token))[1]["origin"]["owner"] == other.id
        assert await here.forget(origin.token, one.id) == 204
        assert (await here.look(origin.token))[0] == 200
        assert await here.forget(origin.token, other.id) == 204
        assert (await here.look(origin.token))[0] == 410


async def test_a_gateway_that_wants_nothing_more_frees_the_engine_at_once() -> None:
    async with site(Script(at=10, fate=Fate.STALLS)) as here:
        _, one = await here.member("one")
        origin = origin_of(one)
        await here.begun(origin)
        await asyncio.sleep(0.2)
        assert not here.engine.seen[0].cancelled.is_set()
        await here.forget(origin.token, one.id)
        async with asyncio.timeout(5):
            await here.engine.seen[0].cancelled.wait()


async def test_what_nobody_comes_for_is_given_up_in_time() -> None:
    async with site(Script(at=10, fate=Fate.STALLS), replace(KEPT, reattach_s=0.3)) as here:
        _, one = await here.member("one")
        await here.begun(origin_of(one))
        async with asyncio.timeout(5):
            await here.engine.seen[0].cancelled.wait()


async def test_clients_have_nothing_of_it_by_its_name() -> None:
    async with site() as here:
        _, one = await here.member("one")
        origin = origin_of(one)
        await here.begun(origin)
        url = here.node.url + STREAMS_PATH + origin.token
        for more in ({}, {LOOK: "1"}):
            async with here.http.get(url, headers=more) as answer:
                assert answer.status == 410
        for more in ({SENT_ON: "1"}, {SENT_ON: "1", LOOK: "1"}):
            async with here.http.get(url, headers=more) as answer:
                assert answer.status == 401
        async with here.http.delete(f"{url}?owner={one.id}") as answer:
            assert answer.status == 410
        last = {"Last-Event-ID": f"{origin.token}.3"}
        async with here.http.post(here.node.url + PATH, json={"prompt": "x", "stream": True}, headers=last) as answer:
            assert answer.status == 410
        assert (await here.look(origin.token))[0] == 200
        assert len(here.engine.seen) == 1


async def test_a_later_owner_here_takes_the_place_of_what_was_kept_before() -> None:
    async with site() as here:
        _, one = await here.member("one")
        origin = origin_of(one)
        await here.begun(origin, 1)
        await here.begun(origin, 2)
        assert (await here.look(origin.token))[1]["generation"] == 2


# ---- a gateway that looks for a stream


@asynccontextmanager
async def gateway(here: Site, name: str) -> AsyncIterator[tuple[Adoption, Standing, Membership]]:
    """One that knows the node."""
    standing, membership = await here.member(name)
    streams = FleetStreams(standing, SecretProver(SECRET), SecretBeliever(SECRET), stops_alone=True)
    async with Verdicts(SecretProver(SECRET)) as verdicts, streams.following():
        coordinator = GatewayCoordinator(Metrics(), verdicts, takeover_timeout_s=5)
        record = Record("a", Role.NODE, here.node.url, readiness=Readiness.READY)
        coordinator.nodes.heard("a", here.node.url, record, asked_s=0.0)
        async with Adoption(standing, streams, coordinator) as adoption:
            yield adoption, standing, membership


async def test_of_two_gateways_that_take_a_stream_up_one_has_it_and_the_other_knows_who() -> None:
    async with site() as here, gateway(here, "one") as (one, _, first), gateway(here, "two") as (two, _, second):
        _, lost = await here.member("lost")
        origin = origin_of(lost)
        await here.begun(origin)
        for adoption in (one, two):
            with pytest.raises(Refused, match="may have the stream still"):
                await adoption.adopt(origin.token, origin.digest)
        await here.lose(lost)
        found = await asyncio.gather(*(a.adopt(origin.token, origin.digest) for a in (one, two)))
        [orphan] = [f for f in found if isinstance(f, Orphan)]
        assert (orphan.session, orphan.generation, orphan.node) == (S, 1, "a")
        [where] = [f for f in found if isinstance(f, str)]
        winner = first if isinstance(found[0], Orphan) else second
        assert where == f"http://{winner.id.partition('.')[0]}:1"
        assert await here.fleet.holder(S) == Claim(S, Generation(1), winner.id)


@pytest.mark.parametrize("wrong", ["digest", "code", "token"])
async def test_another_request_or_version_or_name_finds_nothing(wrong: str) -> None:
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        _, lost = await here.member("lost")
        origin = origin_of(lost, "0.0.0" if wrong == "code" else "")
        await here.begun(origin)
        await here.lose(lost)
        token = origin.token.replace("A", "B") if wrong == "token" else origin.token
        assert await adoption.adopt(token, "1" * 32 if wrong == "digest" else origin.digest) is None
        assert await here.fleet.holder(S) is None


async def test_what_an_earlier_owner_kept_of_a_session_that_went_on_elsewhere_is_nobodys() -> None:
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        standing, lost = await here.member("lost")
        origin = origin_of(lost)
        await here.begun(origin)
        # Its gateway took it to another node, and had that known before anything of that was sent.
        stream = standing.now()
        stream.cover([S])
        assert await stream.record(2)
        held = await here.fleet.holder(S)
        assert held == Claim(S, Generation(2), lost.id)
        # (Here claims go with their owners; elsewhere they stay until they are swept.)
        await here.lose(lost)
        here.fleet._claims[S] = held
        assert await adoption.adopt(origin.token, origin.digest) is None


async def test_a_service_that_does_not_say_whose_it_is_is_no_leave_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        _, lost = await here.member("lost")
        origin = origin_of(lost)
        await here.begun(origin)
        await here.lose(lost)

        async def silent(session: SessionId) -> None:
            raise CoordinationError("no answer")

        monkeypatch.setattr(here.fleet, "holder", silent)
        with pytest.raises(Refused, match="no answer"):
            await adoption.adopt(origin.token, origin.digest)


async def test_a_node_that_speaks_something_else_is_named_in_the_log_and_no_stream_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def no_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"what?\r\n\r\n")
        writer.close()

    async with (
        site() as here,
        gateway(here, "one") as (adoption, _, _),
        await asyncio.start_server(no_http, "127.0.0.1", 0) as server,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        nodes = adoption._coordinator.nodes
        nodes.heard("b", url, Record("b", Role.NODE, url, readiness=Readiness.READY), asked_s=0.0)
        _, lost = await here.member("lost")
        token = origin_of(lost).token
        # Who knows what it keeps: that nobody has the stream would be a last word.
        with pytest.raises(Refused, match="cannot be asked now"):
            await adoption.adopt(token, "0" * 32)
    assert "event=not_asked node=b" in caplog.text
    assert token not in caplog.text
    assert NAME not in caplog.text


async def test_that_nobody_has_a_stream_takes_the_word_of_all_nodes() -> None:
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        _, lost = await here.member("lost")
        token, nodes = origin_of(lost).token, adoption._coordinator.nodes
        assert await adoption.adopt(token, "0" * 32) is None
        # One that has lost its lease may be back in a moment; and who knows of no node yet knows nothing.
        nodes.lost("a", "its lease is not renewed any more")
        with pytest.raises(Refused, match="cannot be asked now"):
            await adoption.adopt(token, "0" * 32)
        nodes.gone("a", "its lease is over")
        with pytest.raises(Refused, match="cannot be asked now"):
            await adoption.adopt(token, "0" * 32)


async def test_a_question_about_a_stream_is_not_sent_where_a_node_points(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    async def point(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=302, headers={"Location": f"/elsewhere{request.path}"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", point)
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        adoption._coordinator.nodes.heard("b", url, Record("b", Role.NODE, url, readiness=Readiness.READY), asked_s=0.0)
        _, lost = await here.member("lost")
        token = origin_of(lost).token
        assert await adoption.adopt(token, "0" * 32) is None
        await runner.cleanup()
    assert asked == [STREAMS_PATH + token]


async def test_names_of_gateways_that_nobody_has_seen_keep_nobody_from_the_streams_of_others() -> None:
    async with site() as here, gateway(here, "one") as (adoption, _, _):
        _, lost = await here.member("lost")
        origin = origin_of(lost)
        await here.begun(origin)
        async with asyncio.timeout(5):
            while not adoption._streams.has_seen(prefix_of_member(lost.id)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await here.lose(lost)
        here.node.hang()
        invented = [f"{index:016x}~{NAME}" for index in range(200)]
        asking = [asyncio.create_task(adoption.adopt(token, "0" * 32)) for token in invented]
        await asyncio.sleep(0.1)
        # Most are refused at once; few wait.
        assert sum(task.done() for task in asking) > 100
        here.node.wake()
        async with asyncio.timeout(ANSWER_S):
            found = await adoption.adopt(origin.token, origin.digest)
        assert isinstance(found, Orphan)
        for task in asking:
            task.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(answer, Refused) and answer.reason == "stream_out_of_reach" for answer in answers)


async def test_a_claim_whose_client_has_left_meanwhile_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_RELEASE_AFTER_S", 0.0)
    async with site() as here, gateway(here, "one") as (adoption, _, membership):
        _, lost = await here.member("lost")
        origin = origin_of(lost)
        await here.begun(origin)
        await here.lose(lost)
        claim, has_claimed = membership.claim, asyncio.Event()

        async def late(*asked: Any) -> ClaimAnswer:
            answer = await claim(*asked)
            has_claimed.set()
            await asyncio.Event().wait()
            return answer

        monkeypatch.setattr(membership, "claim", late)
        asking = asyncio.create_task(adoption.adopt(origin.token, origin.digest))
        await has_claimed.wait()
        assert await here.fleet.holder(S) is not None
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(2):
            while await here.fleet.holder(S) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
