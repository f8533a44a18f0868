"""A stream whose gate is closed stands still, and nothing of it is lost when it opens, or when it is interrupted."""

import asyncio
from dataclasses import replace
from typing import Any

from midstream.proxy.coordinator import Placement, Reason
from midstream.proxy.gate import Gate
from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from support.answers import Answer
from support.proxying import proxied
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(20)


class Gated(ScriptedCoordinator):
    """Its placements have a gate."""

    def _place(self, *what: Any) -> Placement:
        placement = replace(super()._place(*what), gate=Gate())
        self.placements[-1] = placement
        return placement

    @property
    def gate(self) -> Gate:
        """Of the newest one."""
        gate = self.placements[-1].gate
        assert gate is not None
        return gate


def gated(gap_s: float = 0.02) -> Gated:
    return Gated(*(ScriptedEngine(ANSWER, Script(gap_s=gap_s), name=name) for name in "ab"))


async def begun(coordinator: Gated, count: int = 4) -> None:
    async with asyncio.timeout(10):
        while not any(len(j) >= count for j in coordinator.engines[0].journals.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_nothing_goes_through_a_closed_gate_and_everything_when_it_opens() -> None:
    coordinator = gated()
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await begun(coordinator)
        coordinator.gate.close()
        await asyncio.sleep(0.8)
        # The engine has long written all of it.
        assert all(len(j) == 20 for j in coordinator.engines[0].journals.values())
        assert not asking.done()
        coordinator.gate.open()
        got = await asking
    assert (got.text, got.finishes) == (ANSWER.text(), ["length"])
    assert coordinator.of("take_over") == []


async def test_what_waits_at_a_gate_is_not_the_clients_when_its_session_goes_on_elsewhere() -> None:
    coordinator = gated()
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete(**{"return_token_ids": True}))
        await begun(coordinator)
        coordinator.gate.close()
        await asyncio.sleep(0.3)
        journaled = max(len(j) for j in coordinator.engines[0].journals.values())
        coordinator.interrupt(Reason.MOVE)
        got = await asking
    [(_, reason, delivered)] = coordinator.of("take_over")
    assert reason is Reason.MOVE
    assert len(delivered) < journaled
    assert got.ids == list(ANSWER.ids)
    assert got.text == ANSWER.text()


async def test_a_worker_that_is_lost_while_its_gate_is_closed_is_noticed_at_once() -> None:
    coordinator = gated()
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await begun(coordinator)
        coordinator.gate.close()
        await asyncio.sleep(0.1)
        coordinator.interrupt(Reason.PROCESS_DEATH)
        async with asyncio.timeout(5):
            got = await asking
    assert got.text == ANSWER.text()
    assert coordinator.of("take_over")[0][1] is Reason.PROCESS_DEATH


async def test_silence_behind_a_closed_gate_is_no_stall() -> None:
    coordinator = gated()
    impatient = ProxySettings(stall=StallPolicy(floor_s=0.1, factor=1, ceiling_s=0.2))
    async with proxied(coordinator, settings=impatient) as client:
        asking = asyncio.create_task(client.complete())
        await begun(coordinator)
        coordinator.gate.close()
        await asyncio.sleep(1.0)
        coordinator.gate.open()
        got = await asking
    assert got.text == ANSWER.text()
    assert coordinator.of("take_over") == []


async def test_a_gate_can_be_closed_and_opened_any_number_of_times() -> None:
    gate, interrupted = Gate(), asyncio.get_running_loop().create_future()
    assert await gate.passed(interrupted)
    for _ in range(3):
        gate.close()
        gate.close()
        waiting = asyncio.create_task(gate.passed(interrupted))
        await asyncio.sleep(0)
        assert gate.is_closed
        assert not waiting.done()
        gate.open()
        gate.open()
        assert await waiting
    gate.close()
    interrupted.set_result(Reason.MOVE)
    assert not await gate.passed(interrupted)
