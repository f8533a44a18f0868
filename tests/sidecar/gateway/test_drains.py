"""Nodes that drain: what their sessions' clients get, and what becomes of a move when something is in its way."""

import asyncio
import time
from typing import Any

import pytest

from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from midstream.sidecar.drain import room
from midstream.sidecar.drain.saving import Saved
from midstream.sidecar.gateway.moves import MoveSettings
from support.answers import Answer
from support.proxying import Got
from support.scripted import Script, ScriptedEngine
from support.storeys import Node, Storeys, storeys

ANSWER = Answer.words(40)
WHOLE = b"".join(ANSWER.pieces).decode()
STREAM: dict[str, Any] = {"model": "tiny", "prompt": "x", "stream": True}
REPORT = {"X_Midstream_Report": "1"}
EXACT = {**REPORT, "X_Midstream_Policy": "exact"}


def nodes(*names: str, gap_s: float = 0.03) -> list[Node]:
    """Each gets the KV of what it takes in."""
    made = [Node(name, ScriptedEngine(ANSWER, Script(gap_s=gap_s), name=name)) for name in names]
    for node in made:
        node.coordinator.first_kv = KvSource.DISK
    return made


def report_of(got: Got) -> str:
    [told] = [part for part in got.raw.split(b"\n\n") if part.startswith(b": midstream")]
    return told.decode().partition(" gap_ms")[0].removeprefix(": midstream ")


def require_whole(*several: Got) -> None:
    for got in several:
        assert (got.status, got.text, got.finishes) == (200, WHOLE, ["length"]), got


def moves(fleet: Storeys, result: str) -> float:
    found = fleet.metrics.registry.get_sample_value("midstream_drain_moves_total", {"result": result})
    return found or 0.0


def pauses(fleet: Storeys) -> float:
    return fleet.metrics.registry.get_sample_value("midstream_drain_pause_seconds_count") or 0.0


async def asked(fleet: Storeys, outputs: int = 3, **headers: str) -> "tuple[asyncio.Task[Got], Node, Node]":
    """A stream that runs, the node that has it, and the other one."""
    asking = asyncio.create_task(fleet.client.post("/v1/completions", STREAM, **{**REPORT, **headers}))
    await fleet.until(lambda: bool(fleet.serving))
    [name] = fleet.serving
    source = fleet.nodes[name]
    await fleet.until(lambda: any(len(j) >= outputs for j in source.coordinator.engines[0].journals.values()))
    return asking, source, next(node for node in fleet.nodes.values() if node is not source)


async def test_a_session_of_a_node_that_drains_goes_on_at_another_one() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet, X_Midstream_Policy="exact")
        source.coordinator.draining = True
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=exact takeovers=1"
        # It was saved before, and once more when its client had nothing new any more.
        assert [last for _, last, _ in source.moving.saves] == [False, True]
        assert {to for _, _, to in source.moving.saves} == {f"peer://{target.name}:1"}
        [(_, facts, outputs, unseen)] = target.coordinator.of("take_in")
        assert outputs == ANSWER.ids[: len(outputs)]
        assert len(outputs) >= 3
        assert not unseen
        assert source.coordinator.engines[0].seen[-1].cancelled.is_set()
        [told] = fleet.last()["outcomes"]
        assert (told["node"], told["reason"], told["outcome"]) == (target.name, "move", "exact")
        assert (moves(fleet, "moved"), pauses(fleet)) == (1, 1)
        assert facts.session == source.moving.saves[0][0]


async def test_the_client_has_no_more_than_what_the_next_node_goes_on_from() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet)
        source.moving.may_end.clear()
        source.coordinator.draining = True
        await fleet.until(lambda: any(last for _, last, _ in source.moving.saves))
        had = len(source.coordinator.engines[0].journals[source.moving.saves[0][0]])
        # The engine goes on meanwhile.
        await asyncio.sleep(0.2)
        source.moving.may_end.set()
        require_whole(await asking)
        [(_, _, outputs, _)] = target.coordinator.of("take_in")
        assert len(outputs) > had


async def test_a_save_that_fails_leaves_the_session_where_it_is_and_opens_its_stream_again() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet)
        source.moving.may_end.clear()
        source.coordinator.draining = True
        await fleet.until(lambda: any(last for _, last, _ in source.moving.saves))
        source.moving.refusal = Refused("replica_full", "it is full")
        source.moving.may_end.set()
        await fleet.until(lambda: moves(fleet, "refused") == 1)
        source.coordinator.draining = False
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=undisturbed takeovers=0"
        assert target.coordinator.of("take_in") == []


async def test_a_node_without_room_is_noticed_before_the_cut() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet)
        target.moving.places = 0
        source.coordinator.draining = True
        await fleet.until(lambda: moves(fleet, "no_room") >= 1)
        assert source.moving.saves == []
        assert target.coordinator.of("take_in") == []
        target.moving.places = 8
        got = await asking
        require_whole(got)
        assert (moves(fleet, "moved"), moves(fleet, "elsewhere")) in ((1, 0), (0, 0))


async def test_a_promise_that_lapsed_while_a_session_was_saved_is_made_again_before_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "HELD_S", 0.1)
    async with storeys(*nodes("a", "b", gap_s=0.05)) as fleet:
        asking, source, target = await asked(fleet)
        promised: list[int] = []
        save = source.moving.save

        async def slowly(session: str, to: str, *, last: bool) -> Saved:
            if not last:
                await asyncio.sleep(0.3)
            promised.append(target.moving.rooms.count(time.monotonic()))
            return await save(session, to, last=last)

        monkeypatch.setattr(source.moving, "save", slowly)
        source.coordinator.draining = True
        require_whole(await asking)
        assert promised == [0, 1]


async def test_a_drain_that_is_cancelled_while_a_session_is_saved_cuts_nothing() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet)
        source.moving.may_end.clear()
        source.coordinator.draining = True
        await fleet.until(lambda: any(last for _, last, _ in source.moving.saves))
        source.coordinator.draining = False
        await fleet.until(lambda: fleet.state(source.name) == "ready")
        source.moving.may_end.set()
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=undisturbed takeovers=0"
        # Its place is given back.
        await fleet.until(lambda: target.moving.rooms.count(0) == 0)
        assert target.coordinator.of("take_in") == []


async def test_what_the_next_node_does_not_take_after_the_cut_comes_back_exactly() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet, X_Midstream_Policy="exact")
        target.coordinator.refusal = Refused("draining", "it drains, too", retry_after_s=1)
        source.coordinator.draining = True
        await fleet.until(lambda: bool(source.coordinator.of("take_in")))
        source.coordinator.draining = False
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=exact takeovers=1"
        assert moves(fleet, "elsewhere") == 1


async def test_a_target_that_is_lost_after_the_cut_costs_its_session_a_pause_and_nothing_else() -> None:
    async with storeys(*nodes("a", "b"), lost_after_s=0.5) as fleet:
        asking, source, target = await asked(fleet, X_Midstream_Policy="exact")
        source.moving.may_end.clear()
        source.coordinator.draining = True
        await fleet.until(lambda: any(last for _, last, _ in source.moving.saves))
        target.hang()
        source.moving.may_end.set()
        await fleet.until(lambda: bool(source.coordinator.of("take_in")))
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=exact takeovers=1"


async def test_a_node_that_is_lost_while_it_saves_is_a_lost_node() -> None:
    async with storeys(*nodes("a", "b")) as fleet:
        asking, source, target = await asked(fleet)
        source.moving.may_end.clear()
        source.coordinator.draining = True
        await fleet.until(lambda: any(last for _, last, _ in source.moving.saves))
        await source.lose()
        got = await asking
        require_whole(got)
        assert report_of(got) == "outcome=exact takeovers=1"
        assert len(target.coordinator.of("take_in")) == 1
        [told] = fleet.last()["outcomes"]
        assert told["reason"] != "move"


async def test_two_nodes_that_drain_at_once_both_leave_to_the_third() -> None:
    async with storeys(*nodes("a", "b", "c")) as fleet:
        asking = [
            asyncio.create_task(fleet.client.post("/v1/completions", {**STREAM, "prompt": f"x{i}"}, **EXACT))
            for i in range(9)
        ]
        await fleet.until(lambda: len(fleet.serving) == 9 and len(set(fleet.serving)) == 3)
        for name in ("a", "b"):
            fleet.nodes[name].coordinator.draining = True
        answers = await asyncio.gather(*asking)
        require_whole(*answers)
        # One may have gone from the first to the second before it was known that that one drains, too.
        assert {report_of(got).split()[0] for got in answers} <= {"outcome=undisturbed", "outcome=exact"}
        assert fleet.nodes["c"].coordinator.of("take_in")


async def test_no_more_sessions_of_a_node_move_at_once_than_are_to() -> None:
    async with storeys(*nodes("a", "b", gap_s=0.08), moves=MoveSettings(at_once=2)) as fleet:
        asking = [asyncio.create_task(fleet.client.post("/v1/completions", STREAM, **REPORT)) for _ in range(8)]
        await fleet.until(lambda: len(fleet.serving) == 8 and len(set(fleet.serving)) == 2)
        a, b = fleet.nodes.values()
        a.moving.may_end.clear()
        a.coordinator.draining = True
        await fleet.until(lambda: b.moving.rooms.count(0) == 2)
        await asyncio.sleep(0.3)
        assert b.moving.rooms.count(0) == 2
        a.moving.may_end.set()
        require_whole(*await asyncio.gather(*asking))
        # No tail has waited for another session's first snapshot.
        assert a.moving.saving_max == 1
        assert b.coordinator.of("take_in")


async def test_sessions_whose_kv_cannot_be_copied_stay_unless_they_are_to_be_computed_again() -> None:
    for recomputes, wanted in ((False, "outcome=undisturbed takeovers=0"), (True, "outcome=exact takeovers=1")):
        settings = MoveSettings(recomputes=recomputes)
        a, b = nodes("a", "b")
        a.replicas = b.replicas = ""
        async with storeys(a, b, moves=settings) as fleet:
            asking, source, _ = await asked(fleet)
            source.coordinator.draining = True
            got = await asking
            require_whole(got)
            assert report_of(got) == wanted
            assert [(last, to) for _, last, to in source.moving.saves] == ([(True, "")] if recomputes else [])


async def test_an_answer_in_one_piece_moves_with_what_its_engine_has_written() -> None:
    a, b = nodes("a", "b")
    for node in (a, b):
        node.coordinator.engines[0].scripts = [Script(gap_s=1.5)]
    async with storeys(a, b) as fleet:
        body = {"model": "tiny", "prompt": "x", "return_token_ids": True}
        asking = asyncio.create_task(fleet.client.post("/v1/completions", body, **REPORT))
        await fleet.until(lambda: bool(fleet.serving))
        [name] = fleet.serving
        source = fleet.nodes[name]
        await fleet.until(lambda: bool(source.coordinator.engines[0].journals))
        [journal] = source.coordinator.engines[0].journals.values()
        journal[:] = ANSWER.ids[:5]
        source.coordinator.draining = True
        got = await asking
        assert got.status == 200
        [target] = [node for node in (a, b) if node is not source]
        [(_, _, outputs, _)] = target.coordinator.of("take_in")
        assert outputs == ANSWER.ids[:5]
