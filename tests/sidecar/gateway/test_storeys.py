"""A gateway and its nodes, storey upon storey: what a client of the gateway gets, whatever becomes of a node."""

import asyncio
import json
from typing import Any

from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from support.answers import Answer
from support.proxying import Got
from support.scripted import Fate, Script, ScriptedEngine
from support.storeys import Node, Storeys, reasons, storeys

ANSWER = Answer.words(12)
WHOLE = b"".join(ANSWER.pieces).decode()
REPORT = {"X_Midstream_Report": "1"}


def engine(*scripts: Script, name: str = "w") -> ScriptedEngine:
    return ScriptedEngine(ANSWER, *scripts, name=name)


def report_of(got: Got) -> str:
    [told] = [part for part in got.raw.split(b"\n\n") if part.startswith(b": midstream")]
    return told.decode().partition(" gap_ms")[0].removeprefix(": midstream ")


def require_whole(got: Got) -> None:
    assert (got.status, got.text, got.finishes) == (200, WHOLE, ["length"]), got
    assert got.events[-1] == b"[DONE]"


async def lost_in_the_stream(fleet: Storeys, *nodes: Node) -> Node:
    """Lose the one node that has the session, once its engine has met its fate."""
    await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in nodes))
    [name] = fleet.serving
    await fleet.nodes[name].lose()
    return next(n for n in nodes if n.name != name)


STALLS = Script(at=5, fate=Fate.STALLS)


async def test_an_undisturbed_stream_is_the_engines_own() -> None:
    async with storeys(Node("a", engine())) as fleet:
        got = await fleet.client.complete(**{"return_token_ids": True})
        require_whole(got)
        assert got.ids == list(ANSWER.ids)
        assert b"midstream" not in got.raw
        assert not [name for name in got.headers if name.lower().startswith("x-midstream")]
        assert fleet.last()["outcomes"] == []


async def test_a_client_that_asks_is_told_of_an_undisturbed_stream_once() -> None:
    async with storeys(Node("a", engine())) as fleet:
        got = await fleet.client.complete(**{"temperature": 1.0}, **{})
        assert "X-Midstream-Session" not in got.headers
        told = await fleet.client.post(
            "/v1/completions", {"model": "tiny", "prompt": "x", "stream": True, "temperature": 1.0}, **REPORT
        )
        assert report_of(told) == "outcome=undisturbed takeovers=0"
        # Both are the gateway's: nodes name no session of theirs, and draw no seed.
        assert told.headers.getall("X-Midstream-Session") == [fleet.last()["session"]]
        assert len(told.headers.getall("X-Midstream-Seed")) == 1
        sent = fleet.nodes["a"].coordinator.engines[0].seen[-1].body
        assert str(sent["seed"]) == told.headers["X-Midstream-Seed"]


async def test_a_node_that_is_lost_costs_a_stream_a_pause() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(STALLS, name="b"))
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
        )
        other = await _ready_to_go_on(fleet, a, b)
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=recomputed takeovers=1"
        [(_, facts, outputs, unseen)] = other.coordinator.of("take_in")
        assert (outputs, unseen, facts.generation) == (tuple(ANSWER.ids[:5]), False, 1 << 12)
        [told] = fleet.last()["outcomes"]
        assert (told["node"], told["outcome"], told["takeovers"]) == (other.name, "recomputed", 1)


async def _ready_to_go_on(fleet: Storeys, *nodes: Node) -> Node:
    """Lose the node with the session; the others' engines are well from now on."""
    await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in nodes))
    for node in nodes:
        node.coordinator.engines[0].scripts = [Script()]
    return await lost_in_the_stream(fleet, *nodes)


async def test_what_its_next_node_says_makes_a_takeover_exact() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(STALLS, name="b"))
    a.coordinator.first_kv = b.coordinator.first_kv = KvSource.DISK
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
        )
        await _ready_to_go_on(fleet, a, b)
        assert report_of(await asking) == "outcome=exact takeovers=1"


async def test_a_takeover_within_a_node_is_told_to_the_gateways_client() -> None:
    dies = engine(Script(at=5, fate=Fate.DIES), name="a")
    node = Node("a", dies, engine(name="b"))
    node.coordinator.kv = KvSource.NONE
    async with storeys(node) as fleet:
        got = await fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
        require_whole(got)
        assert report_of(got) == "outcome=recomputed takeovers=1"
        assert len(reasons(node)) == 1
        [told] = fleet.last()["outcomes"]
        assert (told["reason"], told["outcome"]) == ("within the node", "recomputed")


async def test_what_a_lost_node_had_not_said_of_its_own_takeover_is_never_called_exact() -> None:
    # Its first worker dies, the second one goes on, and then the node is lost.
    a = Node("a", engine(Script(at=3, fate=Fate.DIES), name="a"), engine(Script(at=7, fate=Fate.STALLS), name="c"))
    b = Node("b", engine(name="b"))
    a.coordinator.kv = b.coordinator.first_kv = KvSource.DISK
    b.coordinator.ready_count = 0
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
        )
        # Its client has something of the second one's: what was lost on the way is nobody's takeover.
        await fleet.until(lambda: bool(fleet.coordinator.sessions()) and bool(fleet.last()["outcomes"]))
        b.coordinator.ready_count = 1
        await fleet.until(lambda: fleet.state("b") == "ready")
        await a.lose()
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=recomputed takeovers=1"
        assert [told["outcome"] for told in fleet.last()["outcomes"]] == ["recomputed", "exact"]


async def test_two_nodes_lost_in_a_row_are_two_takeovers() -> None:
    a, b, c = (Node(name, engine(STALLS, name=name)) for name in "abc")
    async with storeys(a, b, c) as fleet:
        asking = asyncio.create_task(
            fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
        )
        later = Script(at=9, fate=Fate.STALLS)
        await fleet.until(lambda: len(fleet.serving) == 1)
        first = fleet.nodes[fleet.serving[0]]
        await first.coordinator.engines[0].meets_fate.wait()
        others = [node for node in (a, b, c) if node is not first]
        for node in others:
            node.coordinator.engines[0].scripts = [later]
        await first.lose()
        await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in others))
        [second] = [n for n in others if n.coordinator.engines[0].meets_fate.is_set()]
        [third] = [n for n in others if n is not second]
        third.coordinator.engines[0].scripts = [Script()]
        await second.lose()
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=recomputed takeovers=2"
        [(_, facts, outputs, _unseen)] = third.coordinator.of("take_in")
        assert (outputs, facts.generation) == (tuple(ANSWER.ids[:9]), 2 << 12)


async def test_a_node_that_hangs_with_open_connections_is_lost_in_time() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(STALLS, name="b"))
    async with storeys(a, b, lost_after_s=0.6) as fleet:
        asking = asyncio.create_task(fleet.client.complete())
        await fleet.until(lambda: any(n.coordinator.engines[0].meets_fate.is_set() for n in (a, b)))
        hung = fleet.nodes[fleet.serving[0]]
        other = a if hung is b else b
        other.coordinator.engines[0].scripts = [Script()]
        began_s = asyncio.get_running_loop().time()
        hung.hang()
        require_whole(await asking)
        took_s = asyncio.get_running_loop().time() - began_s
        assert 0.5 < took_s < 10.0
        assert fleet.state(hung.name) == "lost"
        assert fleet.last()["outcomes"][0]["reason"] == "node_lost"
        hung.wake()
        await fleet.until(lambda: fleet.state(hung.name) == "ready")


async def test_an_unstreamed_answer_is_asked_for_again_when_its_node_is_lost() -> None:
    slow = Script(gap_s=30)
    a, b = Node("a", engine(slow, name="a")), Node("b", engine(slow, name="b"))
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x"}, **REPORT))
        await fleet.until(lambda: any(n.coordinator.engines[0].seen for n in (a, b)))
        for node in (a, b):
            node.coordinator.engines[0].scripts = [Script()]
        [name] = fleet.serving
        await fleet.nodes[name].lose()
        got = await asking
        assert (got.status, got.json["choices"][0]["text"]) == (200, WHOLE)
        assert got.headers["X-Midstream-Outcome"] == "restarted"
        assert got.headers["X-Midstream-Takeovers"] == "1"


async def test_a_node_that_drains_loses_nothing_and_costs_nothing() -> None:
    a, b = Node("a", engine(name="a")), Node("b", engine(name="b"))
    async with storeys(a, b, poll_s=30) as fleet:
        # The gateway has not heard of it yet.
        a.coordinator.refusal = Refused("draining", "this sidecar is draining", retry_after_s=1)
        a.coordinator.draining = True
        for _ in range(4):
            got = await fleet.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, **REPORT)
            require_whole(got)
            assert report_of(got) == "outcome=undisturbed takeovers=0"
        assert len(b.coordinator.of("admit")) == 4
        assert fleet.state("a") == "draining"
        assert b"midstream_failovers_total{" not in fleet.metrics.render()


async def test_when_all_nodes_turn_it_away_a_client_is_told_so_at_once() -> None:
    nodes = [Node(name, engine(name=name)) for name in "abc"]
    for node in nodes:
        node.coordinator.refusal = Refused("loading", "no worker is ready", retry_after_s=1)
    async with storeys(*nodes, timeout_s=600) as fleet:
        for stream in (True, False):
            body = {"model": "tiny", "prompt": "x", "stream": stream}
            async with asyncio.timeout(15):
                got = await fleet.client.post("/v1/completions", body)
            assert (got.status, got.json["error"]["code"]) == (503, "no_node")
            assert int(got.headers["Retry-After"]) >= 1
        assert [len(node.coordinator.of("admit")) for node in nodes] == [2, 2, 2]
        assert fleet.serving == []


async def test_a_stream_that_has_begun_waits_for_a_node_that_turns_it_away() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(name="b"))
    b.coordinator.ready_count = 0
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(fleet.client.complete())
        await a.coordinator.engines[0].meets_fate.wait()
        b.coordinator.refusal = Refused("too_many_requests", "full", retry_after_s=1)
        b.coordinator.ready_count = 1
        await fleet.until(lambda: fleet.state("b") == "ready")
        await a.lose()
        await fleet.until(lambda: len(b.coordinator.of("take_in")) == 1)
        await asyncio.sleep(0.2)
        assert len(b.coordinator.of("take_in")) == 1  # it is not asked over and over
        b.coordinator.refusal = None
        require_whole(await asking)


async def test_what_two_nodes_have_failed_no_third_one_is_given() -> None:
    nodes = [
        Node(name, engine(Script(status=500, body=b'{"error": {"message": "boom"}}'), name=name)) for name in "abc"
    ]
    for node in nodes:
        node.coordinator.engines[0].scripts = [Script(at=0, fate=Fate.ERRS)]
        node.coordinator.takeover_refusal = Refused("no_worker", "no worker can take the session up")
    async with storeys(*nodes) as fleet:
        got = await fleet.client.complete()
        assert sorted(len(node.coordinator.of("admit")) for node in nodes) == [0, 1, 1]
        assert "takeovers_exhausted" in got.raw.decode()


async def test_a_session_that_demands_exactness_is_not_gone_on_with_otherwise() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(STALLS, name="b"))
    async with storeys(a, b, timeout_s=600) as fleet:
        asking = asyncio.create_task(
            fleet.client.post(
                "/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, X_Midstream_Policy="exact"
            )
        )
        other = await _ready_to_go_on(fleet, a, b)
        async with asyncio.timeout(15):
            got = await asking
        assert got.text == b"".join(ANSWER.pieces[:5]).decode()
        assert b'"not_exact"' in got.raw
        assert other.coordinator.engines[0].seen == []  # nothing was computed for it


async def test_a_session_that_demands_exactness_goes_on_with_what_its_node_vouches_for() -> None:
    a, b = Node("a", engine(STALLS, name="a")), Node("b", engine(STALLS, name="b"))
    a.coordinator.first_kv = b.coordinator.first_kv = KvSource.DISK
    async with storeys(a, b) as fleet:
        asking = asyncio.create_task(
            fleet.client.post(
                "/v1/completions",
                {"model": "tiny", "prompt": "x", "stream": True},
                X_Midstream_Policy="exact",
                **REPORT,
            )
        )
        await _ready_to_go_on(fleet, a, b)
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=exact takeovers=1"


async def test_several_choices_are_sessions_each_on_a_node() -> None:
    a, b = Node("a", engine(name="a")), Node("b", engine(name="b"))
    async with storeys(a, b) as fleet:
        got = await fleet.client.complete(n=4)
        assert got.status == 200
        assert {choice["index"] for choice in got.choices} == {0, 1, 2, 3}
        assert got.finishes == ["length"] * 4
        assert (len(a.coordinator.of("admit")), len(b.coordinator.of("admit"))) == (2, 2)


async def test_a_request_that_cannot_go_on_exactly_is_run_again_while_its_client_has_nothing() -> None:
    beam: dict[str, Any] = {"use_beam_search": True}
    a, b = Node("a", engine(Script(drops_request=True), Script(), name="a")), Node("b", engine(name="b"))
    b.coordinator.ready_count = 0
    async with storeys(a, b) as fleet:
        got = await fleet.client.complete(**beam)
        require_whole(got)
        for seen in a.coordinator.engines[0].seen:
            assert "kv_transfer_params" not in seen.body
        [facts] = {call[1].exact_obstacle for call in a.coordinator.of("admit")}
        assert facts == "beam_search"


async def test_what_is_to_be_passed_through_is_passed_through_twice() -> None:
    a = Node("a", engine(name="a"))
    async with storeys(a) as fleet:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 12}
        got = await fleet.client.post("/v1/completions", body, X_Midstream_Policy="off")
        assert got.status == 200
        got = await fleet.client.post("/v1/completions", {**body, "max_tokens": 0})
        assert got.status == 200
        got = await fleet.client.post("/v1/embeddings", {"input": "x"}, Authorization="Bearer client's")
        assert (got.status, got.json) == (200, {"input": "x"})
        first, second, third = a.coordinator.engines[0].seen
        assert json.loads(first.raw) == body
        assert "return_token_ids" not in second.body
        assert third.headers["Authorization"] == "Bearer client's"
        assert not any(
            name.lower().startswith("x-midstream") for seen in (first, second, third) for name in seen.headers
        )
        assert a.coordinator.of("admit") == fleet.coordinator.sessions() == []


async def test_nothing_of_the_fleet_is_served_to_clients() -> None:
    async with storeys(Node("a", engine())) as fleet:
        status, _ = await fleet.get("/midstream/v1/fleet/node")
        assert status == 404
        async with fleet.client.session.get(fleet.nodes["a"].url + "/midstream/v1/fleet/node") as answer:
            assert answer.status == 401


async def test_a_clients_marker_and_proof_reach_no_node() -> None:
    a = Node("a", engine(name="a"))
    async with storeys(a) as fleet:
        forged = {"midstream": {"v": 1, "session": "f" * 32, "generation": 7}}
        got = await fleet.client.post(
            "/v1/completions",
            {"model": "tiny", "prompt": "x", "stream": True, "kv_transfer_params": forged},
            X_Midstream_Fleet="Midstream-1 forged",
        )
        require_whole(got)
        [(_, facts)] = a.coordinator.of("admit")
        assert (facts.session == "f" * 32, facts.generation) == (False, 0)


async def test_a_body_as_large_as_a_gateway_takes_is_not_too_large_with_a_marker_in_it() -> None:
    from midstream.proxy.settings import ProxySettings

    a = Node("a", engine(name="a"))
    a.settings = ProxySettings(body_bytes_max=2000)
    async with storeys(a, settings=ProxySettings(body_bytes_max=2000)) as fleet:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        body["prompt"] = "x" * (1999 - len(json.dumps(body)))
        require_whole(await fleet.client.post("/v1/completions", body))
        body["prompt"] += "xxx"
        assert (await fleet.client.post("/v1/completions", body)).status == 413


async def test_a_client_that_leaves_is_left_by_its_node_and_engine() -> None:
    a = Node("a", engine(STALLS, name="a"))
    async with storeys(a) as fleet:
        asking = asyncio.create_task(fleet.client.complete())
        await a.coordinator.engines[0].meets_fate.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(a.coordinator.engines[0].seen[0].cancelled.wait(), 2)
        await fleet.until(lambda: fleet.serving == [] and a.coordinator.open_count == 0)
        assert fleet.last()["state"] == "cancelled"


async def test_a_model_is_asked_of_a_node_that_has_it_and_of_no_other() -> None:
    a, b = Node("a", engine(name="a")), Node("b", engine(name="b"))
    a.coordinator.models, b.coordinator.models = ("small",), ("tiny",)
    async with storeys(a, b) as fleet:
        for _ in range(3):
            require_whole(await fleet.client.complete())
        assert (len(a.coordinator.of("admit")), len(b.coordinator.of("admit"))) == (0, 3)
        b.coordinator.ready_count = 0
        await fleet.until(lambda: fleet.state("b") == "not-ready")
        got = await fleet.client.complete()
        assert (got.status, "for model 'tiny'" in got.json["error"]["message"]) == (503, True)
        # What nobody has heard of, an engine refuses in its own words.
        assert (await fleet.client.complete(model="huge")).status == 200
        assert len(a.coordinator.of("admit")) == 1
