"""Bodies that somebody else sends."""

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from midstream.session.errors import CoordinationError
from midstream.sidecar.bounded_body import bounded_body
from midstream.sidecar.fleet import bodies
from midstream.sidecar.fleet.bodies import whole


def client(sent: list[int]) -> TestClient[web.Request, web.Application]:
    """A server that sends 10,000 bytes a piece, and counts them."""

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while len(sent) < int(request.query["pieces"]):
            await answer.write(b"x" * 10_000)
            sent.append(10_000)
        return answer

    app = web.Application()
    app.router.add_get("/", endless)
    return TestClient(TestServer(app))


async def test_a_body_comes_whole_up_to_its_bound_to_the_byte() -> None:
    async with client([]) as asking, asking.get("/?pieces=5") as answer:
        assert await bounded_body(answer.content, 50_000) == b"x" * 50_000
    async with client([]) as asking, asking.get("/?pieces=5") as answer:
        with pytest.raises(ValueError, match="more than 49999 bytes"):
            await bounded_body(answer.content, 49_999)


async def test_of_a_body_without_end_no_more_is_taken_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    async with client(sent) as asking, asking.get("/?pieces=1000000", timeout=aiohttp.ClientTimeout(10)) as answer:
        with pytest.raises(ValueError, match="more than"):
            await bounded_body(answer.content, 1 << 20)
    assert sum(sent) < 64 << 20
    monkeypatch.setattr(bodies, "ANSWER_BYTES_MAX", 1 << 20)
    async with client([]) as asking, asking.get("/?pieces=1000", timeout=aiohttp.ClientTimeout(10)) as answer:
        with pytest.raises(CoordinationError, match="answered more than 1048576 bytes; what else lies"):
            await whole(answer.content)
