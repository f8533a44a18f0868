"""What the embedded engine does not offer is refused by name, whatever the policy, and never ignored."""

import pytest

from support.features import CHAT, GREEDY, NOT_OFFERED, Refused
from support.moving import Stage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


@pytest.mark.parametrize("asked", [pytest.param(asked, id=asked.name) for asked in NOT_OFFERED])
async def test_what_is_not_offered_is_refused_by_name(stage: Stage, asked: Refused) -> None:
    told = await stage.tell({**(CHAT if asked.chat else GREEDY), **asked.fields})
    assert told.status in (400, 404)
    assert told.error["param"] == asked.param
    assert asked.param in told.error["message"] or str(asked.fields[asked.param]) in told.error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_apis_that_are_not_offered_are_not_found(stage: Stage, path: str) -> None:
    body = {"model": stage.model, "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    async with stage.http.post(stage.process.url + path, json=body) as answer:
        assert answer.status == 404, await answer.text()
