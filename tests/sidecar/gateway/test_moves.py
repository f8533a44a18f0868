"""When a gateway asks a node that drains, and what it does with what comes to nothing."""

import asyncio
import time
from collections.abc import Collection
from typing import Any, cast

from midstream.proxy.coordinator import SessionFacts
from midstream.proxy.policy import Policy
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.drain.order import Leaving
from midstream.sidecar.fleet.record import Readiness, Record, Role
from midstream.sidecar.gateway.moves import Moves, MoveSettings
from midstream.sidecar.gateway.node_table import NodeTable
from midstream.sidecar.gateway.orders import Saved
from midstream.sidecar.gateway.session import Session, Stay
from midstream.sidecar.metrics import Metrics

S = SessionId("5" * 32)
KEY = "k" * 32


class Asked:
    """A node that answers at once: how often it was asked, and what for."""

    def __init__(self) -> None:
        self.lists = self.holds = self.cuts = 0
        self.seconds = 0.0
        self.saves: list[bool] = []
        self.on_last: Any = lambda: None

    async def leaving(self, url: str) -> list[Leaving]:
        self.lists += 1
        await asyncio.sleep(0.001)
        return [Leaving(S, 10, 1, key=KEY)]

    async def hold(self, url: str, session: SessionId, tokens: int, keys: Collection[str]) -> None:
        self.holds += 1

    async def release(self, url: str, session: SessionId) -> None:
        pass

    async def save(self, url: str, session: SessionId, to: str, *, last: bool) -> Saved:
        self.saves.append(last)
        if last:
            self.on_last()
        return Saved((1,), 10, 0, self.seconds)


def emptied(asked: Asked) -> tuple[Moves, NodeTable, Session]:
    """A node that drains, with one session, and another one that would take it."""
    nodes = NodeTable(on_lost=lambda _: None, on_change=lambda: None)
    for name, readiness in (("a", Readiness.DRAINING), ("b", Readiness.READY)):
        record = Record(
            name, Role.NODE, f"http://{name}:1", readiness=readiness, keys=(KEY,), replicas=f"peer://{name}:1"
        )
        nodes.heard(name, record.url, record, asked_s=0.0)
    nodes.add_open("a", 1)
    facts = SessionFacts(S, "/v1/completions", {}, True, Policy.BEST_EFFORT, "")
    session = Session(facts, [Stay("a", 2, ())], 0.0)
    return Moves(nodes, {S: session}, cast(Any, asked), Metrics(), MoveSettings()), nodes, session


async def lasted(moves: Moves, seconds: float) -> None:
    moves.look()
    await asyncio.sleep(seconds)
    await moves.close()


async def test_a_session_that_has_said_nothing_since_it_came_back_has_nobody_asked() -> None:
    asked = Asked()
    moves, _, session = emptied(asked)
    session.since_s = time.monotonic()
    await lasted(moves, 0.7)
    assert asked.lists == 0


async def test_a_move_that_came_to_nothing_without_an_error_is_put_off_like_one_that_failed() -> None:
    asked = Asked()
    moves, _, session = emptied(asked)
    # It is being taken up just when its tail is saved: not cut, and in a moment as before.

    def interrupted() -> None:
        session.since_s = 1.0
        asyncio.get_running_loop().call_later(0.005, lambda: setattr(session, "since_s", None))

    session.placement = cast(Any, _Placement())
    asked.on_last = interrupted
    await lasted(moves, 0.9)
    assert asked.saves == [False, True]
    assert asked.lists == 1


async def test_a_session_whose_saves_take_longer_than_a_client_may_wait_is_not_cut() -> None:
    asked = Asked()
    asked.seconds = 6.0
    moves, _, session = emptied(asked)
    session.placement = cast(Any, _Placement())
    await lasted(moves, 0.5)
    assert asked.saves == [False] * 5


async def test_a_target_that_has_given_its_room_to_others_is_noticed_before_the_gate_is_closed() -> None:
    class Full(Asked):
        async def hold(self, url: str, session: SessionId, tokens: int, keys: Collection[str]) -> None:
            await super().hold(url, session, tokens, keys)
            if self.holds > 1:
                raise Refused("no_room", "others took it")

    asked = Full()
    moves, _, session = emptied(asked)
    session.placement = placement = cast(Any, _Placement())
    await lasted(moves, 0.5)
    assert (asked.holds, asked.saves) == (2, [False])
    assert placement.gate.closed == 0


class _Gate:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def open(self) -> None:
        pass


class _Placement:
    def __init__(self) -> None:
        self.gate = _Gate()
        self.interrupted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
