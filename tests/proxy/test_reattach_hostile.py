"""Who has no stream, or another's, gets nothing: wrong names, guesses by the thousand, other methods, many streams."""

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from midstream.proxy import reattach_elsewhere
from midstream.proxy.event_ids import is_token
from midstream.proxy.reattach_elsewhere import STREAMS_PATH
from midstream.proxy.settings import ProxySettings
from support.answers import Answer
from support.proxying import Client, proxied
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(12)
SETTINGS = ProxySettings(reattach_s=5.0)


def coordinator(script: Script | None = None) -> ScriptedCoordinator:
    return ScriptedCoordinator(ScriptedEngine(ANSWER, script or Script(), name="a"))


async def told(answer: aiohttp.ClientResponse) -> tuple[int, str]:
    """Status and code of an error."""
    return answer.status, json.loads(await answer.read())["error"]["code"]


async def ask(client: Client, token: str, query: str = "", method: str = "GET", **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.session.request(method, client.url + STREAMS_PATH + token + query, headers=named) as answer:
        return await told(answer) if answer.status != 204 else (204, "")


async def test_wrong_ended_and_misspelt_names_are_told_the_same_and_no_engine_hears_of_them() -> None:
    workers = coordinator()
    async with proxied(workers, replace(SETTINGS, reattach_s=0.1)) as client:
        ended = (await client.complete()).headers["X-Midstream-Stream"]
        await asyncio.sleep(0.3)
        answers = set()
        for token in (ended, secrets.token_urlsafe(16), "node-9~" + secrets.token_urlsafe(16), "x", "a/b", ""):
            async with client.session.get(client.url + STREAMS_PATH + token) as answer:
                answers.add((answer.status, await answer.read()))
        assert len(answers) == 1
        assert next(iter(answers))[0] == 410
        assert (await client.complete()).status == 200
        unknown = await client.post("/v1/completions", {"stream": True}, Last_Event_ID=f"{ended}.3")
        assert (unknown.status, unknown.json["error"]["code"]) == (410, "stream_gone")
        assert "Last-Event-ID" in unknown.json["error"]["message"]
    assert len(workers.engines[0].seen) == 2


async def test_a_new_sidecar_knows_no_stream_of_the_one_before() -> None:
    async with proxied(coordinator(), SETTINGS) as client:
        token = (await client.complete()).headers["X-Midstream-Stream"]
    async with proxied(coordinator(), SETTINGS) as client:
        assert await ask(client, token, "?from=2") == (410, "stream_gone")


async def test_the_name_of_a_stream_with_another_request_is_a_409_and_leaves_the_stream_alone() -> None:
    async with proxied(coordinator(Script(gap_s=0.02)), SETTINGS) as client:
        got = await client.complete(prompt="mine")
        token = got.headers["X-Midstream-Stream"]
        other = await client.post("/v1/completions", {"prompt": "another"}, Last_Event_ID=f"{token}.1")
        assert (other.status, other.json["error"]["code"]) == (409, "another_request")
        # The same body for another API is another request, too.
        body = {"model": "tiny", "prompt": "mine", "stream": True}
        elsewhere = await client.post("/v1/chat/completions", body, Last_Event_ID=f"{token}.1")
        assert elsewhere.status == 409
        same = await client.post("/v1/completions", body, Last_Event_ID=f"{token}.0")
        assert same.raw == got.raw


async def test_an_id_that_is_none_of_ours_goes_to_the_engine_as_ever() -> None:
    workers = coordinator()
    async with proxied(workers, SETTINGS) as client:
        got = await client.post("/v1/completions", {"model": "m", "prompt": "x", "stream": True}, Last_Event_ID="42")
        assert got.status == 200
    assert workers.engines[0].seen[0].headers["Last-Event-ID"] == "42"


@pytest.mark.parametrize(
    ("query", "known"),
    [
        ("?from=-1", ""),
        ("?from=x", ""),
        ("?from=1e3", ""),
        ("?from=", ""),
        ("", "7"),
        ("", f"{'A' * 22}.7"),
        ("", "%s"),
    ],
)
async def test_a_position_that_is_none_is_a_400_with_words(query: str, known: str) -> None:
    async with proxied(coordinator(), SETTINGS) as client:
        token = (await client.complete()).headers["X-Midstream-Stream"]
        headers = {"Last_Event_ID": known.replace("%s", token)} if known else {}
        assert await ask(client, token, query, **headers) == (400, "bad_request")


async def test_a_stream_can_be_read_and_given_up_and_nothing_else() -> None:
    workers = coordinator(Script(gap_s=0.05))
    async with proxied(workers, SETTINGS) as client:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as answer:
            token = answer.headers["X-Midstream-Stream"]
            for method in ("POST", "PUT", "PATCH", "OPTIONS"):
                assert await ask(client, token, method=method) == (405, "wrong_method")
            async with client.session.head(client.url + STREAMS_PATH + token) as head:
                assert (head.status, head.headers["Allow"]) == (405, "GET, DELETE")
            assert await ask(client, token, method="DELETE") == (204, "")
            await asyncio.wait_for(workers.engines[0].seen[0].cancelled.wait(), 5)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert await ask(client, token, method="DELETE") == (410, "stream_gone")
        assert await ask(client, token) == (410, "stream_gone")
    assert workers.of("ended") == [("ended", "cancelled")]
    assert len(workers.engines[0].seen) == 1, "no engine hears of a stream's name"


async def test_guesses_by_the_thousand_disturb_nobody_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    workers = coordinator(Script(gap_s=0.05))
    async with proxied(workers, SETTINGS) as client:
        reading = asyncio.create_task(client.complete())

        async def guess() -> set[tuple[int, str]]:
            return {await ask(client, secrets.token_urlsafe(16), "?from=0") for _ in range(100)}

        assert set.union(*await asyncio.gather(*(guess() for _ in range(30)))) == {(410, "stream_gone")}
        got = await reading
    token = got.headers["X-Midstream-Stream"]
    assert got.raw.count(token.encode()) == got.raw.count(b"\n\n") == 13
    assert workers.of("ended") == [("ended", "finished")]
    assert token not in caplog.text


async def test_more_streams_than_may_be_kept_run_without_ids_or_in_place_of_those_that_were_had() -> None:
    async with proxied(coordinator(Script(gap_s=0.03)), replace(SETTINGS, reattach_streams_max=3)) as client:
        got = await asyncio.gather(*(client.complete() for _ in range(5)))
        named = [one for one in got if "X-Midstream-Stream" in one.headers]
        assert len(named) == 3
        for one in got:
            assert (b"\nid: " in one.raw) == (one in named)
            assert one.raw.rstrip().endswith(b"[DONE]") or one in named
        # All of them have been read to their ends, so a new one takes the oldest one's place.
        newest = (await client.complete()).headers["X-Midstream-Stream"]
        tokens = [one.headers["X-Midstream-Stream"] for one in named] + [newest]
        statuses = []
        for token in tokens:
            async with client.session.get(client.url + STREAMS_PATH + token) as answer:
                statuses.append(answer.status)
        assert sorted(statuses) == [200, 200, 200, 410]
        assert statuses[-1] == 200


async def test_sessions_without_readers_count_as_open_requests_and_hold_their_bodies() -> None:
    settings = replace(SETTINGS, reattach_s=0.5, requests_max=2, bodies_bytes_max=60_000)
    async with proxied(coordinator(Script(gap_s=0.2)), settings) as client:
        body = {"model": "tiny", "prompt": "x" * 25_000, "stream": True}
        for _ in range(2):
            async with client.session.post(client.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
                answer.close()
        refused = await client.complete()
        assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_requests")
        await asyncio.sleep(1.0)
        assert (await client.complete(max_tokens=1)).status == 200
    async with proxied(coordinator(Script(gap_s=0.2)), replace(settings, requests_max=10)) as client:
        async with client.session.post(client.url + "/v1/completions", json=body) as answer:
            answer.close()
        refused = await client.complete(prompt="x" * 50_000)
        assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_bytes")


class Fleet:
    """Where the nodes of a fleet are."""

    tls = None
    own_name = ""

    def __init__(self, own_prefix: str) -> None:
        self.own_prefix = own_prefix
        self.urls: dict[str, str] = {}
        self.asked: list[str] = []
        self.vouched: list[tuple[str, str, bytes]] = []

    def vouch(self, method: str, target: str, body: bytes) -> str:
        self.vouched.append((method, target, body))
        return f"{method} {target} {len(body)}"

    def believes(self, method: str, target: str, body: bytes, proof: str, *, shown: bool) -> str:
        return "" if proof == f"{method} {target} {len(body)}" else "another proof"

    async def base_url_of(self, prefix: str) -> str | None:
        self.asked.append(prefix)
        return self.urls.get(prefix)


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[Client, Client, Fleet, Fleet]]:
    """Two sidecars that know each other."""
    one, other = Fleet("one"), Fleet("other")
    async with (
        proxied(coordinator(Script(gap_s=0.01)), SETTINGS, one) as here,
        proxied(coordinator(Script(gap_s=0.01)), SETTINGS, other) as there,
    ):
        for fleet in (one, other):
            fleet.urls = {"one": here.url, "other": there.url}
        yield here, there, one, other


async def test_a_stream_of_another_node_is_fetched_from_there_and_each_node_is_asked_for_its_own() -> None:
    async with two_nodes() as (here, there, one, _):
        got = await there.complete(prompt="mine")
        token = got.headers["X-Midstream-Stream"]
        assert token.startswith("other~")
        assert is_token(token)
        async with here.session.get(here.url + STREAMS_PATH + token + "?from=0") as answer:
            assert answer.status == 200
            assert answer.headers["X-Midstream-Stream"] == token
            assert await answer.read() == got.raw
        body = {"model": "tiny", "prompt": "mine", "stream": True}
        again = await here.post("/v1/completions", body, Last_Event_ID=f"{token}.10")
        assert got.raw.endswith(again.raw)
        assert again.raw.count(b"\n\n") == got.raw.count(b"\n\n") - 10
        assert one.asked == ["other", "other"]
        assert [said[:2] for said in one.vouched] == [
            ("GET", STREAMS_PATH + token + "?from=0"),
            ("POST", "/v1/completions"),
        ]


async def test_who_only_says_that_it_was_passed_on_is_refused_and_nothing_is_asked_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with two_nodes() as (here, there, one, _):
        got = await there.complete(prompt="mine")
        token = got.headers["X-Midstream-Stream"]
        for client in (here, there):
            async with client.session.get(
                f"{client.url}{STREAMS_PATH}{token}?from=0", headers={"X-Midstream-Sent-On": "GET / 0"}
            ) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "not_of_the_fleet")
        assert one.asked == []
        assert "why=another proof" in caplog.text


async def test_a_node_that_does_not_answer_is_not_taken_for_one_that_has_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reattach_elsewhere, "_ANSWER_S", 0.3)
    async with two_nodes() as (here, _, one, _), silent() as url:
        token = secrets.token_urlsafe(16)
        for one.urls["other"] in (url, "http://127.0.0.1:9"):
            async with here.session.get(f"{here.url}{STREAMS_PATH}other~{token}?from=0") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "stream_out_of_reach")
                assert int(answer.headers["Retry-After"]) > 0


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_stream_that_its_node_has_no_more_is_gone_everywhere_and_asked_for_once() -> None:
    async with two_nodes() as (here, there, one, other):
        gone = "other~" + secrets.token_urlsafe(16)
        assert await ask(here, gone) == (410, "stream_gone")
        assert await ask(here, "third~" + secrets.token_urlsafe(16)) == (410, "stream_gone")
        assert one.asked == ["other", "third"]
        # Nodes that do not agree on who is who ask each other once, and not for ever.
        other.urls["other"] = here.url
        one.urls["third"], other.urls["third"] = there.url, here.url
        assert await ask(here, "third~" + secrets.token_urlsafe(16)) == (410, "stream_gone")
        assert other.asked == []
        assert await ask(there, secrets.token_urlsafe(16)) == (410, "stream_gone")
