"""The embedded engine as real processes: a holder, arenas, servers that can be killed, and a mover done by hand.

The mover here copies between pools as docs/formats.md says and nothing more; it shares no code with the real one.
"""

import asyncio
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from midstream.session.arena import ArenaReader, LoadState, Slot, create_arena
from midstream.session.errors import ArenaError
from midstream.session.held import HolderClient, map_pool
from midstream.session.ids import SessionId
from midstream.session.layout import PoolMeta
from midstream.session.marker import KvSource, Marker, Resume, with_marker

PYTHON_VARIABLE = "MIDSTREAM_TEST_TRANSFORMERS_PYTHON"
START_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"event=ready .*port=(\d+)")


class Server:
    """One server process; its log is kept in a file."""

    def __init__(self, python: str, model: Path, log: Path, env: Mapping[str, str], args: Sequence[str] = ()) -> None:
        command = [python, "-m", "midstream.adapters.transformers.server", "--model", str(model), "--port", "0"]
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--threads", "1", *args], env={**os.environ, **env}, stdout=out, stderr=out
            )
        self.base_url = ""

    def wait_ready(self) -> "Server":
        """Wait until it serves; RuntimeError with its log when it does not."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if found := _READY.search(self.log.read_text()):
                self.base_url = f"http://127.0.0.1:{found[1]}"
                return self
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL, as the kernel's OOM killer would."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM, and no waiting."""
        self.process.send_signal(signal.SIGTERM)


@dataclass(slots=True)
class Worker:
    """A server beside the test's holder, with its arena."""

    server: Server
    arena: Path

    @property
    def url(self) -> str:
        """The server's base URL."""
        return self.server.base_url

    def reader(self) -> ArenaReader:
        """A reader of the arena; the caller closes it."""
        return ArenaReader(self.arena)


class Bench:
    """A state directory with a running holder, in which workers are started."""

    def __init__(self, folder: Path, python: str, model: Path) -> None:
        self._folder = folder
        self._python = python
        self._model = model
        self._workers: list[Worker] = []
        self.socket = folder / "holder.sock"
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(self.socket)]
        )
        deadline_s = time.monotonic() + 10
        while not self.socket.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def start(
        self, name: str, *, epoch: int = 1, adopt: Path | None = None, args: Sequence[str] = (), slots: int = 64
    ) -> Worker:
        """Start a worker; call `ready` before use."""
        arena = self._folder / f"{name}.{epoch}.arena"
        create_arena(arena, slot_count=slots, page_count=16 * slots)
        env = {
            "MIDSTREAM_ARENA": str(arena),
            "MIDSTREAM_HOLDER": str(self.socket),
            "MIDSTREAM_WORKER": name,
            "MIDSTREAM_EPOCH": str(epoch),
            "MIDSTREAM_LOAD_TIMEOUT_S": "2",
        }
        if adopt is not None:
            env["MIDSTREAM_ADOPT"] = str(adopt)
        server = Server(self._python, self._model, self._folder / f"{name}.{epoch}.log", env, args)
        worker = Worker(server, arena)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End everything."""
        for worker in self._workers:
            worker.server.kill()
        self._holder.terminate()
        self._holder.wait(10)

    async def move(self, old: Worker, new: Worker, session: SessionId) -> int:
        """What the mover does for a session that waits in `new`: copy its blocks from `old`, and say so."""
        with closing(old.reader()) as source, closing(new.reader()) as sink:
            there = await waiting_slot(sink, session)
            here = source.find(session)
            assert here is not None
            outputs = sink.journal(there)
            assert source.journal(here)[: len(outputs)] == outputs
            positions = here.prompt_len + len(outputs) - 1
            self._copy(source, here, sink, there, positions)
            sink.answer(there, LoadState.DONE, positions)
            return positions

    def _copy(self, source: ArenaReader, here: Slot, sink: ArenaReader, there: Slot, positions: int) -> None:
        old, old_meta = self._pool(source)
        new, new_meta = self._pool(sink)
        count = -(-positions // old_meta.layout.block_tokens)
        pairs = zip(source.table(here).blocks[:count], sink.table(there).blocks[:count], strict=True)
        for block, target in pairs:
            spans = zip(old_meta.layout.spans(block), new_meta.layout.spans(target), strict=True)
            for (start, end), (to, to_end) in spans:
                new[to:to_end] = old[start:end]
        old.close()
        new.close()

    def _pool(self, reader: ArenaReader) -> tuple[mmap.mmap, PoolMeta]:
        facts = reader.facts()
        assert facts is not None
        fd, body = HolderClient(self.socket).get(facts["pools"][0])
        try:
            meta = PoolMeta.from_json(body)
            return map_pool(fd, meta.size_bytes), meta
        finally:
            os.close(fd)


async def waiting_slot(reader: ArenaReader, session: SessionId, limit_s: float = 10.0) -> Slot:
    """The slot of a session that waits for its KV."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        slot = reader.find(session)
        if slot is not None and slot.load is LoadState.WAITING:
            return slot
        await asyncio.sleep(0.002)
    raise AssertionError(f"session {session} never waited for its KV")


def resume_marker(old: Worker, session: SessionId, kv: KvSource, outputs: Sequence[int] | None = None) -> Marker:
    """The marker with which a session of `old` goes on, from what its arena says."""
    with closing(old.reader()) as reader:
        slot = reader.find(session)
        if slot is None:
            raise ArenaError(f"session {session} is not in {old.arena}")
        journal = reader.journal(slot)
        taken = tuple(journal if outputs is None else outputs)
        return Marker(session, slot.generation + 1, Resume(taken, kv, slot.prompt_hash))


@dataclass(slots=True)
class Told:
    """What a stream told its reader."""

    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: object = None
    usage: dict[str, int] | None = None
    error: str | None = None
    done: bool = False

    @property
    def answer(self) -> tuple[list[int], str, str | None]:
        """What must be equal to the undisturbed run."""
        return self.ids, self.text, self.finish


async def events(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; AssertionError when it is none. `{}` stands for [DONE]."""
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if not line.strip() or line.startswith(b":"):
                continue
            assert line.startswith(b"data: "), line
            data = line[6:].strip()
            yield {} if data == b"[DONE]" else json.loads(data)


async def listen(
    http: aiohttp.ClientSession,
    base_url: str,
    body: Mapping[str, Any],
    *,
    marker: Marker | None = None,
    told: Told | None = None,
    tokens: int | None = None,
) -> Told:
    """Read a stream into `told` until it ends, breaks, or `tokens` have come."""
    told = Told() if told is None else told
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **body}
    if marker is not None:
        asked = with_marker(asked, marker)
    try:
        async for event in events(http, base_url + path, asked):
            _take(told, event)
            if tokens is not None and len(told.ids) >= tokens:
                break
    except aiohttp.ClientError as error:
        told.error = repr(error)
    return told


def _take(told: Told, event: dict[str, Any]) -> None:
    if not event:
        told.done = True
        return
    if "error" in event:
        told.error = event["error"]["message"]
        return
    told.usage = event.get("usage") or told.usage
    told.prompt_ids = event.get("prompt_token_ids") or told.prompt_ids
    for choice in event["choices"]:
        told.ids += choice.get("token_ids") or []
        told.prompt_ids = choice.get("prompt_token_ids") or told.prompt_ids
        told.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        told.finish = choice["finish_reason"] or told.finish
        told.stop_reason = choice.get("stop_reason") or told.stop_reason
