"""What can wait makes way for sessions that wait for their KV, and not for ever."""

import asyncio
import time

import pytest

from midstream.sidecar.mover import way as way_of_work
from midstream.sidecar.mover.way import Way


async def test_others_go_on_when_the_last_session_has_been_answered() -> None:
    way, gone = Way(), list[str]()
    await way.make()
    way.enter()
    way.enter()

    async def go() -> None:
        await way.make()
        gone.append("on")

    going = asyncio.create_task(go())
    way.leave()
    await asyncio.sleep(0.01)
    assert gone == []
    way.leave()
    await asyncio.wait_for(going, 5)
    assert gone == ["on"]


async def test_nobody_makes_way_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_of_work, "WAY_S_MAX", 0.05)
    way = Way()
    way.enter()
    began = time.monotonic()
    await way.make()
    assert time.monotonic() - began >= 0.05
