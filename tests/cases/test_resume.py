"""Cases from the field: where a stream is taken up again (r2-r12), on scripted engines."""

import pytest
from support.answers import Answer
from support.proxying import proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

from midstream.proxy.settings import ProxySettings


@pytest.mark.parametrize("cut_at", [0, 1, 5, 11])
async def test_r4_no_token_is_lost_or_repeated_wherever_the_worker_dies(cut_at: int) -> None:
    answer = Answer.words(12)
    first = ScriptedEngine(answer, Script(at=cut_at), name="a")
    coordinator = ScriptedCoordinator(first, ScriptedEngine(answer, name="b"))
    async with proxied(coordinator, ProxySettings()) as client:
        got = await client.complete(return_token_ids=True)
    assert got.text == answer.text()
    assert got.ids == list(answer.ids)
    assert got.finishes == ["length"]
    assert got.events[-1] == b"[DONE]"
    assert len({chunk["id"] for chunk in got.chunks}) == 1
    assert len({chunk["created"] for chunk in got.chunks}) == 1
    assert coordinator.of("ended") == [("ended", "finished")]
