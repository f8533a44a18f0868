"""Requests that cannot go on exactly: each is recognised by its word, and refused before any engine hears of it."""

import pytest

from midstream.proxy.eligible import NO_SESSION, why_not_resumable
from support.answers import Answer
from support.obstacles import OBSTACLES, Obstructed
from support.proxying import proxied
from support.scripted import ScriptedCoordinator, ScriptedEngine


@pytest.mark.parametrize("asked", [pytest.param(asked, id=asked.id) for asked in OBSTACLES])
def test_an_obstacle_is_recognised(asked: Obstructed) -> None:
    assert why_not_resumable(asked.body, asked.path) is asked.word


@pytest.mark.parametrize("asked", [pytest.param(a, id=a.id) for a in OBSTACLES if a.word not in NO_SESSION])
@pytest.mark.parametrize("stream", [True, False])
async def test_where_exact_is_asked_for_it_is_refused_before_it_begins(asked: Obstructed, stream: bool) -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(Answer.words(3), name="a"))
    async with proxied(coordinator) as client:
        got = await client.post(asked.path, {**asked.body, "stream": stream}, X_Midstream_Policy="exact")
    assert got.status == 422
    assert repr(asked.word.value) in got.json["error"]["message"]
    assert coordinator.calls == []
    assert coordinator.engines[0].seen == []
