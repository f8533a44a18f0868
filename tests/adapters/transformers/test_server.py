"""The embedded engine's server, for real: what a client sees, alone and in company, and how it goes down."""

import asyncio
import io
import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.session.arena import SlotState
from midstream.session.ids import SessionId
from midstream.session.marker import Marker
from support.embedded import Bench, Server, Worker, listen

pytestmark = [pytest.mark.engine, pytest.mark.timeout(90)]

GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def worker(bench: Bench) -> Worker:
    """One server for the whole module."""
    worker = bench.start("server", args=("--kv-cache-bytes", str(64 * 1024 * 1024), "--served-model-name", "tiny"))
    worker.server.wait_ready()
    return worker


async def post(http: aiohttp.ClientSession, url: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, worker: Worker, **fields: Any) -> dict[str, Any]:
    status, body = await post(http, f"{worker.url}/v1/completions", {**GREEDY, "return_token_ids": True, **fields})
    assert status == 200, body
    return body


async def tokens(http: aiohttp.ClientSession, worker: Worker, **fields: Any) -> list[int]:
    ids: list[int] = (await complete(http, worker, **fields))["choices"][0]["token_ids"]
    return ids


async def test_answers_do_not_depend_on_neighbours(worker: Worker, http: aiohttp.ClientSession) -> None:
    bodies = [
        GREEDY,
        {**GREEDY, "temperature": 1.0, "seed": 3, "prompt": "Twice upon a time"},
        {**GREEDY, "prompt": "a very long story " * 90, "max_tokens": 100},
        {**GREEDY, "prompt": "x", "temperature": 0.7, "seed": 4, "presence_penalty": 1.0, "top_p": 0.8},
    ]
    alone = [await listen(http, worker.url, body) for body in bodies]
    for _ in range(2):
        together = await asyncio.gather(*(listen(http, worker.url, body) for body in bodies))
        assert [t.answer for t in together] == [a.answer for a in alone]
    assert len({tuple(a.ids[:20]) for a in alone}) == len(alone)


async def test_streams_and_answers_say_the_same(worker: Worker, http: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "An emoji 🎉?"}], "max_tokens": 150, "temperature": 0}
    told = await listen(http, worker.url, body)
    status, answer = await post(http, f"{worker.url}/v1/chat/completions", {**body, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert status == 200
    assert told.answer == (choice["token_ids"], choice["message"]["content"], choice["finish_reason"])
    assert told.usage == answer["usage"]
    assert told.prompt_ids == answer["prompt_token_ids"]
    assert told.done
    assert "\ufffd" not in told.text[:-1]
    assert any(ord(c) > 0x1F000 for c in told.text), "the tiny model says emoji"


async def test_two_hundred_greedy_tokens_do_not_run_in_circles(worker: Worker, http: aiohttp.ClientSession) -> None:
    ids = await tokens(http, worker, max_tokens=200)
    assert len(set(ids)) > 30
    tail = ids[100:]
    assert not [p for p in range(1, 50) if all(a == b for a, b in zip(tail, tail[p:], strict=False))]


async def test_narrow_sampling_is_greedy(worker: Worker, http: aiohttp.ClientSession) -> None:
    wanted = await tokens(http, worker)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert await tokens(http, worker, temperature=1.0, seed=1, **narrow) == wanted


async def test_a_seed_decides_and_without_one_answers_differ(worker: Worker, http: aiohttp.ClientSession) -> None:
    hot = {"temperature": 1.0}
    assert await tokens(http, worker, seed=5, **hot) == await tokens(http, worker, seed=5, **hot)
    assert await tokens(http, worker, seed=5, **hot) != await tokens(http, worker, seed=6, **hot)
    assert await tokens(http, worker, **hot) != await tokens(http, worker, **hot)


async def test_tokens_are_drawn_as_often_as_their_probability_says(worker: Worker, http: aiohttp.ClientSession) -> None:
    body = await complete(http, worker, max_tokens=1, logprobs=20, return_tokens_as_token_ids=True)
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    count = 400
    drawn = Counter(
        [(await tokens(http, worker, max_tokens=1, temperature=1.0, seed=seed))[0] for seed in range(count)]
    )
    for name, logprob in top.items():
        p = math.exp(logprob)
        deviation = math.sqrt(count * p * (1 - p))
        assert abs(drawn[int(name.removeprefix("token_id:"))] - count * p) < 5 * deviation + 1


async def test_bias_penalties_and_min_tokens_are_heard(worker: Worker, http: aiohttp.ClientSession) -> None:
    plain = await tokens(http, worker)
    assert plain[0] not in await tokens(http, worker, logit_bias={str(plain[0]): -100})
    penalised = await tokens(http, worker, presence_penalty=2.0, frequency_penalty=2.0)
    assert max(Counter(penalised).values()) < max(Counter(plain).values())
    repetition = await tokens(http, worker, repetition_penalty=1.5)
    assert repetition != plain
    # Token 2 is the end; with this bias it comes as soon as it may.
    ended = (await complete(http, worker, logit_bias={"2": 100}, min_tokens=7))["choices"][0]
    assert (len(ended["token_ids"]), ended["token_ids"][-1], ended["finish_reason"]) == (8, 2, "stop")
    ignored = await tokens(http, worker, logit_bias={"2": 100}, ignore_eos=True, max_tokens=5)
    assert ignored == [2] * 5
    stopped = (await complete(http, worker, stop_token_ids=[plain[4]]))["choices"][0]
    assert stopped["token_ids"] == plain[: plain.index(plain[4]) + 1]
    assert stopped["stop_reason"] == plain[4]


async def test_stop_strings_end_the_text_and_may_be_included(worker: Worker, http: aiohttp.ClientSession) -> None:
    text = (await complete(http, worker))["choices"][0]["text"]
    stop = text[20:24]
    for include in (False, True):
        told = await listen(http, worker.url, {**GREEDY, "stop": stop, "include_stop_str_in_output": include})
        end = text.index(stop) + (len(stop) if include else 0)
        assert (told.text, told.finish, told.stop_reason) == (text[:end], "stop", stop)


async def test_logprobs_are_probabilities_of_what_was_said(worker: Worker, http: aiohttp.ClientSession) -> None:
    choice = (await complete(http, worker, logprobs=3, max_tokens=5))["choices"][0]
    entries = choice["logprobs"]
    assert "".join(entries["tokens"]) == choice["text"]
    # Greedy: what was said is the likeliest.
    assert entries["token_logprobs"] == [max(top.values()) for top in entries["top_logprobs"]]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    _, chat = await post(http, f"{worker.url}/v1/chat/completions", {**body, "temperature": 0})
    content = chat["choices"][0]["logprobs"]["content"]
    assert [len(e["top_logprobs"]) for e in content] == [2, 2, 2]
    assert all(e["logprob"] == e["top_logprobs"][0]["logprob"] for e in content)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {**GREEDY, "n": 2}, 400, "n"),
        ("/v1/completions", {**GREEDY, "model": "other"}, 404, "model"),
        ("/v1/completions", {**GREEDY, "max_tokens": 5000}, 400, "max_tokens"),
        ("/v1/completions", {**GREEDY, "prompt": "x" * 3000}, 400, "max_tokens"),
        ("/v1/completions", {**GREEDY, "prompt": [100000]}, 400, "prompt"),
        ("/v1/completions", {**GREEDY, "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {**GREEDY, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [1]}, 400, "tools"),
        ("/v1/completions", {**GREEDY, "prompt": "\ud800"}, 400, "prompt"),
        ("/v1/completions", [], 400, None),
        ("/v1/nothing", {}, 404, None),
        ("/health", {}, 405, None),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(
    worker: Worker, http: aiohttp.ClientSession, path: str, body: object, status: int, param: str | None
) -> None:
    found, answer = await post(http, worker.url + path, body)
    assert (found, answer["error"]["code"], answer["error"]["param"]) == (status, status, param)
    assert answer["error"]["message"]


async def test_what_is_no_json_or_too_large_loses_nobody_else(worker: Worker, http: aiohttp.ClientSession) -> None:
    wanted = await listen(http, worker.url, GREEDY)
    other = asyncio.create_task(listen(http, worker.url, GREEDY))
    async with http.post(f"{worker.url}/v1/completions", data=b"\xff{") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]
    async with http.post(f"{worker.url}/v1/completions", data=b"[" * 100_000) as response:
        assert response.status == 400
    async with http.post(f"{worker.url}/v1/completions", data=io.BytesIO(b" " * (33 * 1024 * 1024))) as response:
        assert response.status == 413
        assert "bytes" in (await response.json())["error"]["message"]
    assert (await other).answer == wanted.answer


async def test_what_a_sidecar_asks_is_answered(worker: Worker, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{worker.url}/health") as response:
        assert response.status == 200
    async with http.get(f"{worker.url}/v1/models") as response:
        (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    async with http.get(f"{worker.url}/version") as response:
        assert (await response.json())["version"].startswith("5.")
    _, named = await post(http, f"{worker.url}/v1/completions", GREEDY, **{"X-Request-Id": "mine"})
    assert named["id"] == "cmpl-mine"
    with closing(worker.reader()) as reader:
        facts = reader.facts()
        assert facts is not None
        assert facts["pools"] == ["server/1/0"]
        assert facts["pid"] == worker.server.process.pid
        assert (facts["key"]["engine"], facts["key"]["threads"], facts["key"]["lora"]) == ("transformers", 1, None)


async def test_a_request_id_that_is_no_text_breaks_nothing(worker: Worker) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(worker.url.rpartition(":")[2]))
    body = json.dumps({**GREEDY, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: \xff\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["id"] == "cmpl-?"


async def test_a_client_that_leaves_frees_its_session_within_a_second(
    worker: Worker, http: aiohttp.ClientSession
) -> None:
    session = SessionId("0d" * 16)
    told = await listen(http, worker.url, {**GREEDY, "max_tokens": 2000}, marker=Marker(session, 1), tokens=5)
    left_s = time.monotonic()
    assert told.finish is None
    with closing(worker.reader()) as reader:
        while True:
            slot = reader.find(session)
            assert slot is not None
            if slot.state is SlotState.FINISHED:
                break
            assert time.monotonic() - left_s < 1.0
            await asyncio.sleep(0.01)
        assert slot.finish == "abort"
        assert len(reader.journal(slot)) < 2000


async def test_a_client_that_does_not_read_stops_only_its_own_session(
    worker: Worker, http: aiohttp.ClientSession
) -> None:
    session = SessionId("0e" * 16)
    body = {**GREEDY, "max_tokens": 2000, "stream": True, "logprobs": 20, "return_token_ids": True}
    body["kv_transfer_params"] = {"midstream": Marker(session, 1).to_json()}
    raw = json.dumps(body).encode()
    with closing(socket.socket()) as client:
        # A small window, set before the connection is made, so that little is buffered on the way.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", int(worker.url.rpartition(":")[2])))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + raw)
        with closing(worker.reader()) as reader:
            lengths = [-1, -2]
            async with asyncio.timeout(30):
                while lengths[-1] != lengths[-2] or lengths[-1] < 1:
                    await asyncio.sleep(0.5)
                    slot = reader.find(session)
                    lengths.append(0 if slot is None else len(reader.journal(slot)))
            assert lengths[-1] < 1900, "the session went on although nobody read"
            assert (await listen(http, worker.url, GREEDY)).finish == "length"


async def test_quiet_stops_a_stream_and_loses_nothing(worker: Worker, http: aiohttp.ClientSession) -> None:
    body = {**GREEDY, "max_tokens": 400}
    wanted = await listen(http, worker.url, body)
    stream = asyncio.create_task(listen(http, worker.url, body))
    await asyncio.sleep(0.05)
    async with http.post(f"{worker.url}/midstream/quiesce") as response:
        assert response.status == 204
    await asyncio.sleep(0.3)
    assert not stream.done()
    async with http.post(f"{worker.url}/midstream/unquiesce") as response:
        assert response.status == 204
    assert (await stream).answer == wanted.answer


async def test_after_the_grace_period_streams_end_as_aborted_and_can_be_taken_up(
    bench: Bench, http: aiohttp.ClientSession
) -> None:
    worker = bench.start("hurried", args=("--grace-seconds", "0"))
    worker.server.wait_ready()
    session = SessionId("0f" * 16)
    body = {**GREEDY, "max_tokens": 2000}
    stream = asyncio.create_task(listen(http, worker.url, body, marker=Marker(session, 1)))
    await asyncio.sleep(0.2)
    worker.server.terminate()
    told = await stream
    assert (told.finish, told.done) == ("abort", True)
    assert await asyncio.to_thread(worker.server.process.wait, 10) == 0
    with closing(worker.reader()) as reader:
        slot = reader.find(session)
        assert slot is not None
        assert slot.state is SlotState.LIVE
        assert reader.journal(slot) == told.ids
        assert reader.table(slot).blocks


def test_a_server_that_cannot_start_says_why(python: str, tiny: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(tiny, torn)
    os.truncate(torn / "model.safetensors", 5000)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for args, words in (
            (["--model", str(tiny), "--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--model", str(torn), "--port", "0"], "expected a Hugging Face folder"),
        ):
            command = [python, "-m", "midstream.adapters.transformers.server", *args]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 2
            assert words in done.stderr
            assert "Traceback" not in done.stderr


async def test_without_arena_and_holder_it_serves_and_sigterm_lets_streams_finish(
    python: str, tiny: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    (tmp_path / "broken").write_bytes(b"this is no arena")
    env = {
        "MIDSTREAM_ARENA": str(tmp_path / "broken"),
        "MIDSTREAM_HOLDER": str(tmp_path / "nobody"),
        "MIDSTREAM_ADOPT": str(tmp_path / "missing"),
        "MIDSTREAM_WORKER": "alone",
    }
    server = Server(python, tiny, tmp_path / "log", env).wait_ready()
    try:
        body, marker = {**GREEDY, "max_tokens": 1000}, Marker(SessionId("aa" * 16), 1)
        stream = asyncio.create_task(listen(http, server.base_url, body, marker=marker))
        await asyncio.sleep(0.2)
        server.terminate()
        await asyncio.sleep(0.1)
        status, answer = await post(http, f"{server.base_url}/v1/completions", GREEDY)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        told = await stream
        assert (told.finish, len(told.ids), told.done) == ("length", 1000, True)
        assert await asyncio.to_thread(server.process.wait, 10) == 0
        log = server.log.read_text()
        assert log.count("event=no_arena") == log.count("event=pool_not_held") == log.count("event=not_adopted") == 1
    finally:
        server.kill()
